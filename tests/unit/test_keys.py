from deco_ray.keys import generator, key, torch_seed


def test_a_key_depends_on_every_part_and_its_type():
    keys = {key(1, 2), key(12), key("1", 2), key(1, "2"), key(2, 1), key(1, 2, 0)}
    assert len(keys) == 6


def test_the_same_parts_draw_the_same_numbers():
    assert (generator(3, "a", 1).random(5) == generator(3, "a", 1).random(5)).all()
    assert not (generator(3, "a", 1).random(5) == generator(3, "a", 2).random(5)).any()


def test_torch_seeds_are_positive_and_signed_64_bit():
    assert 0 <= torch_seed(1, "x") < 2**63
