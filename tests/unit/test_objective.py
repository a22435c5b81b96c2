import pytest
import torch
import torch.nn.functional as F

from deco_ray.models import Visit, create_model
from deco_ray.training.objective import consistency_loss, visit_loss


def oracle_consistency(logits):
    """Eq. 14 written out with loops over pseudo-bags and classes."""
    p = logits.double().softmax(-1)
    m, classes = p.shape
    mean = [sum(p[i, c] for i in range(m)) / m for c in range(classes)]
    return sum(p[i, c] * torch.log(p[i, c] / mean[c]) for i in range(m) for c in range(classes)) / m


def test_consistency_follows_equation_14():
    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)) * 3
    assert consistency_loss(logits).item() == pytest.approx(oracle_consistency(logits).item(), abs=1e-6)
    assert consistency_loss(logits[:1].repeat(3, 1)).item() == pytest.approx(0, abs=1e-6)


def test_the_gradient_of_consistency_is_that_of_the_equation():
    start = torch.randn(3, 4, generator=torch.Generator().manual_seed(5)) * 2
    by_hand, by_autograd = start.clone().requires_grad_(), start.clone().requires_grad_()
    (0.5 * consistency_loss(by_hand)).backward()
    (0.5 * oracle_consistency(by_autograd)).backward()
    torch.testing.assert_close(by_hand.grad, by_autograd.grad, atol=1e-6, rtol=1e-5)


def test_consistency_survives_certain_predictions():
    logits = torch.tensor([[200.0, -200.0], [-200.0, 200.0]], requires_grad=True)
    loss = consistency_loss(logits)
    loss.backward()
    assert loss.item() == pytest.approx(0.6931, abs=1e-3)
    assert torch.isfinite(logits.grad).all()


def test_total_is_the_sum_of_equation_13_with_a_methods_extras():
    torch.manual_seed(1)
    visit = Visit(torch.randn(4), torch.randn(3, 4), main_weight=0.7, extra={"instance": torch.tensor(0.25)})
    label = torch.tensor(2)
    total, terms = visit_loss(visit, label, F.cross_entropy, beta=0.5)
    main = F.cross_entropy(visit.logits[None], label[None])
    pseudo = torch.stack([F.cross_entropy(row[None], label[None]) for row in visit.sub_logits]).mean()
    torch.testing.assert_close(total, 0.7 * main + pseudo + 0.5 * consistency_loss(visit.sub_logits) + 0.25)
    assert set(terms) == {"main", "pseudo", "consistency", "instance"}


def test_without_pseudo_bags_only_the_main_loss_remains():
    visit = Visit(torch.randn(4), torch.zeros(0, 4))
    total, terms = visit_loss(visit, torch.tensor(1), F.cross_entropy, beta=0.5)
    assert total.item() == terms["main"].item()
    assert set(terms) == {"main"}


@pytest.mark.parametrize("gated", [False, True])
def test_one_instance_pass_gives_the_gradients_of_four_forwards(gated):
    torch.manual_seed(0)
    model = create_model("abmil", dim=32, classes=4, hidden=24, attention_dim=8, gated=gated)
    bag, label = F.normalize(torch.randn(50, 32)), torch.tensor(3)
    subs = [torch.randperm(50)[:25].sort().values for _ in range(3)]

    def gradients(visit):
        model.zero_grad()
        total, _ = visit_loss(visit, label, F.cross_entropy, beta=0.5)
        total.backward()
        return total.item(), [parameter.grad.clone() for parameter in model.parameters()]

    one_loss, one = gradients(model.visit(bag, label, subs, criterion=F.cross_entropy))
    four_loss, four = gradients(Visit(model(bag), torch.stack([model(bag[members]) for members in subs])))
    assert one_loss == pytest.approx(four_loss, abs=1e-5)
    for left, right in zip(one, four):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5)
