"""Spherical K-means: against a slow oracle, against scikit-learn, and the invariances of the partition."""

from __future__ import annotations

import logging

import faiss
import numpy as np
import pytest
from scipy.stats import special_ortho_group
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score
from threadpoolctl import threadpool_limits

from deco_ray.anchors import fit_kmeans, kmeans
from deco_ray.anchors.kmeans import CHUNK, LocalScanner, PoolError, borders, choose_backend, fit, shares
from deco_ray.anchors.lloyd import BLOCK, Fit, farthest, lloyd, nearest, one_thread, partial, step
from deco_ray.anchors.start import kmeans_plus_plus, sample_rows
from deco_ray.errors import DecoError
from deco_ray.keys import generator


def blobs(n: int, d: int, k: int, spread: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Unit rows around k random directions, with the direction of each."""
    rng = generator(seed, "blobs")
    truth = rng.integers(0, k, n)
    directions = np.linalg.qr(rng.normal(size=(d, max(k, 2))))[0].T[:k]
    return unit(directions[truth] + spread * rng.normal(size=(n, d)) / np.sqrt(d)), truth


def unit(rows: np.ndarray) -> np.ndarray:
    rows = np.asarray(rows, np.float64)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def slow_lloyd(x: np.ndarray, centroids: np.ndarray, iterations: int) -> tuple[np.ndarray, list[float]]:
    """Assign by cosine, average, normalise; one row at a time, float64."""
    objectives = []
    for _ in range(iterations):
        sums, objective = np.zeros(centroids.shape), 0.0
        for row in x.astype(np.float64):
            cosines = centroids @ row
            sums[cosines.argmax()] += row
            objective += cosines.max()
        centroids = sums / np.linalg.norm(sums, axis=1, keepdims=True)
        objectives.append(objective / len(x))
    return centroids, objectives


def mean_cosine(x: np.ndarray, centroids: np.ndarray) -> float:
    return float((x.astype(np.float64) @ centroids.T.astype(np.float64)).max(axis=1).mean())


def labels(x: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    return nearest(x, centroids)[1]


def test_iterations_are_those_of_the_slow_oracle():
    x, _ = blobs(700, 12, 5, 1.5)
    start = kmeans_plus_plus(x, 5, seed=1)
    with LocalScanner(x) as scanner:
        found = lloyd(scanner, start, iterations=6)
    expected, objectives = slow_lloyd(x, start.astype(np.float64), len(found.record))
    np.testing.assert_allclose(found.centroids, expected, atol=1e-6)
    np.testing.assert_allclose([line.objective for line in found.record], objectives, atol=1e-6)


@pytest.mark.parametrize(("k", "spread"), [(4, 0.5), (10, 0.4), (24, 0.3)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_separable_blobs_are_found_exactly(k, spread, seed):
    x, truth = blobs(1500, 32, k, spread, seed)
    assert adjusted_rand_score(truth, labels(x, fit_kmeans(x, k, seed=seed))) == 1.0


@pytest.mark.parametrize(("spread", "tolerance"), [(0.5, 1e-6), (3.0, 5e-3)])  # separable, overlapping
def test_objective_agrees_with_scikit_learn(spread, tolerance):
    x, _ = blobs(2000, 16, 8, spread)
    with threadpool_limits(1):
        theirs = mean_cosine(x, unit(KMeans(8, n_init=4, random_state=0).fit(x).cluster_centers_))
    ours = max(mean_cosine(x, fit_kmeans(x, 8, seed=seed, iterations=100)) for seed in range(4))
    assert ours == pytest.approx(theirs, rel=tolerance)


def test_from_the_same_start_scikit_learn_moves_the_same_way():
    x, _ = blobs(2000, 16, 6, 0.8)
    start = kmeans_plus_plus(x, 6, seed=0)
    with threadpool_limits(1):
        theirs = KMeans(6, init=start, n_init=1, max_iter=100).fit(x)
    ours = fit_kmeans(x, 6, seed=0, iterations=100)
    assert adjusted_rand_score(theirs.labels_, labels(x, ours)) > 0.99


def test_agrees_with_faiss_from_the_same_start():
    x, _ = blobs(4000, 16, 8, 2.0)
    reference = faiss.Kmeans(16, 8, niter=20, spherical=True, max_points_per_centroid=10**6, seed=1)
    with one_thread():
        reference.train(x, init_centroids=kmeans.start(x, 8, seed=0))
    assert mean_cosine(x, fit_kmeans(x, 8, iterations=20)) == pytest.approx(
        mean_cosine(x, reference.centroids), rel=1e-4
    )


def test_rotation_leaves_the_partition():
    x, _ = blobs(2000, 16, 6, 0.8)
    turned = unit(x @ special_ortho_group.rvs(16, random_state=0))
    np.testing.assert_array_equal(labels(x, fit_kmeans(x, 6)), labels(turned, fit_kmeans(turned, 6)))


def test_permutation_and_duplication_leave_the_partition():
    x, _ = blobs(1000, 16, 6, 0.5)
    before = labels(x, fit_kmeans(x, 6))
    order = generator(0, "order").permutation(len(x))
    assert adjusted_rand_score(before, labels(x, fit_kmeans(x[order], 6))) == 1.0
    assert adjusted_rand_score(before, labels(x, fit_kmeans(np.repeat(x, 3, axis=0), 6))) == 1.0


def test_length_of_rows_does_not_matter():
    x, _ = blobs(1000, 16, 6, 1.0)
    lengths = generator(0, "lengths").uniform(0.01, 100, (len(x), 1)).astype(np.float32)
    np.testing.assert_array_equal(labels(x, fit_kmeans(x, 6)), labels(x, fit_kmeans(x * lengths, 6)))


def test_every_thread_count_gives_the_same_bits(monkeypatch):
    monkeypatch.setattr(kmeans, "CHUNK", 512)
    x, _ = blobs(5000, 64, 16, 3.0)
    expected = fit(x, 16, iterations=8, workers=1)
    for threads in (2, 5):
        found = fit(x, 16, iterations=8, workers=threads)
        assert found.centroids.tobytes() == expected.centroids.tobytes()
        assert found.record == expected.record


def test_result_keeps_its_promises():
    x, _ = blobs(3000, 16, 8, 3.0)
    found = fit(x, 20, iterations=30)
    np.testing.assert_allclose(np.linalg.norm(found.centroids, axis=1), 1.0, atol=1e-6)
    assert found.centroids.dtype == np.float32
    assert len(np.unique(found.centroids, axis=0)) == 20
    objective = np.array([line.objective for line in found.record])
    assert (np.diff(objective) > -1e-7).all()


def test_stops_when_no_centroid_moves():
    x, _ = blobs(500, 16, 4, 0.2)
    found = fit(x, 4, iterations=50)
    assert len(found.record) < 50
    assert found.record[-1].moved == 0
    assert all(line.moved for line in found.record[:-1])


def test_partial_sums_cover_every_row():
    x, _ = blobs(BLOCK + 300, 8, 4, 1.0)
    part = partial(x, x[:4])
    assert part.counts.sum() == len(x)
    np.testing.assert_allclose(part.sums.sum(axis=0), x.sum(axis=0, dtype=np.float64), rtol=1e-5)
    for cluster in range(4):
        members = x[labels(x, x[:4]) == cluster].sum(axis=0, dtype=np.float64)
        np.testing.assert_allclose(part.sums[cluster], members, rtol=1e-5, atol=1e-4)


def test_empty_clusters_get_the_worst_served_rows():
    x = unit(np.array([[1, 0, 0], [1, 0.01, 0], [1, 0.02, 0], [0.5, 1, 0], [0.2, 0, 1]]))
    start = np.stack([x[0]] * 3)  # ties go to the first: clusters 1 and 2 are empty
    with LocalScanner(x) as scanner:
        found = step(scanner, Fit(start, ()))
    assert found.record[0].repairs == 2
    np.testing.assert_allclose(found.centroids[1], x[4], atol=1e-7)  # cosine 0.20 to the only centroid
    np.testing.assert_allclose(found.centroids[2], x[3], atol=1e-7)  # cosine 0.45


def test_a_cluster_of_one_row_is_never_emptied_to_fill_another():
    x = unit(np.array([[1, 0, 0], [0.9, 0.1, 0], [0, 0, 1]]))
    start = unit(np.array([[1, 0, 0], [1, 0, -0.001], [0.5, 0.8, 0.3]]))
    with LocalScanner(x) as scanner:
        found = lloyd(scanner, start, 10)
    assert sorted(labels(x, found.centroids)) == [0, 1, 2]


def test_duplicates_do_not_keep_clusters_empty():
    x = unit(np.array([[1, 0, 0]] * 500 + [[0, 1, 0]] * 3 + [[0, 0, 1]]))
    centroids = fit_kmeans(x, 3)
    assert len(set(labels(x, centroids))) == 3
    assert mean_cosine(x, centroids) == pytest.approx(1.0)


def test_farthest_rows_are_distinct_and_ties_go_to_the_first():
    x = np.eye(3, dtype=np.float32)[[0, 1, 1, 2, 2]]
    found = farthest(x, x[:1], 2, first_row=10)
    assert found.rows.tolist() == [11, 13]


def test_start_is_k_distinct_rows_of_the_sample():
    x, _ = blobs(400, 8, 4, 2.0)
    start = kmeans_plus_plus(x, 30, seed=5)
    assert len(np.unique(start, axis=0)) == 30
    rows = {row.tobytes() for row in x}
    assert all(row.tobytes() in rows for row in start)
    assert not np.array_equal(start, kmeans_plus_plus(x, 30, seed=6))


def test_sample_of_a_large_pool_is_bounded_and_keyed():
    rows = sample_rows(10**6, 64, seed=0)
    assert len(np.unique(rows)) == 64 * 256
    np.testing.assert_array_equal(rows, sample_rows(10**6, 64, seed=0))
    assert len(sample_rows(10**6, 4096, seed=0)) == 65_536
    np.testing.assert_array_equal(sample_rows(100, 64, seed=0), np.arange(100))


def test_chunk_borders_depend_on_the_data_only():
    n = 3 * CHUNK + 17
    for workers in (1, 2, 5):
        dealt = sorted(border for share in shares(n, workers) for border in share)
        assert dealt == borders(n)
    assert borders(n)[-1] == (3 * CHUNK, n)


def test_a_file_gives_what_its_array_gives(tmp_path):
    x, _ = blobs(1000, 16, 6, 1.0)
    np.save(tmp_path / "pool.npy", x)
    np.testing.assert_array_equal(fit_kmeans(tmp_path / "pool.npy", 6), fit_kmeans(x, 6))


def test_resumes_from_the_saved_iteration(tmp_path):
    x, _ = blobs(3000, 16, 8, 3.0)
    calm = fit(x, 8, iterations=9)
    state = tmp_path / "state.npz"
    fit(x, 8, iterations=4, state=state)
    with LocalScanner(x) as scanner:
        scans = []
        scan = scanner.scan
        scanner.scan = lambda centroids: scans.append(1) or scan(centroids)
        resumed = lloyd(scanner, kmeans.start(x, 8, 0), 9, state)
    assert len(scans) == 5
    assert resumed.centroids.tobytes() == calm.centroids.tobytes()
    assert resumed.record == calm.record


def test_a_damaged_state_is_as_none(tmp_path):
    x, _ = blobs(300, 8, 4, 3.0)
    state = tmp_path / "state.npz"
    calm = fit(x, 4, iterations=3, state=state)
    whole = state.read_bytes()
    for data in (b"", whole[:50], whole[: len(whole) // 2], whole.replace(b"moved", b"mowed"), b"nonsense"):
        state.write_bytes(data)
        assert fit(x, 4, iterations=3, state=state).centroids.tobytes() == calm.centroids.tobytes()
        assert len(state.read_bytes()) == len(whole)


@pytest.mark.parametrize(("rows", "distinct"), [(50, 3), (2, 2)])
def test_too_few_distinct_rows_are_refused_with_the_numbers(rows, distinct):
    x = np.eye(8, dtype=np.float32)[np.arange(rows) % distinct]
    with pytest.raises(DecoError, match=rf"k=4 .* {rows} pooled ones hold {distinct}"):
        fit_kmeans(x, 4)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_rows_without_a_direction_are_refused_by_number(value):
    x, _ = blobs(100, 8, 4, 1.0)
    x[37] = value
    with pytest.raises(PoolError, match="row 37 to cluster is a zero vector or not finite"):
        fit_kmeans(x, 4)


@pytest.mark.parametrize("bad", [{"k": 0}, {"k": 4, "iterations": 0}, {"k": 4, "backend": "cloud"}])
def test_impossible_requests_are_refused(bad):
    with pytest.raises(DecoError):
        fit_kmeans(blobs(100, 8, 4, 1.0)[0], **bad)


def test_an_array_that_is_not_rows_is_refused():
    with pytest.raises(PoolError, match=r"shape \[10\]"):
        fit_kmeans(np.ones(10, np.float32), 2)


@pytest.mark.parametrize(("free", "picked"), [(10**9, "local"), (10**6, "sharded")])
def test_auto_picks_by_memory_and_says_so(monkeypatch, caplog, free, picked):
    monkeypatch.setattr(kmeans, "free_memory", lambda: free)
    with caplog.at_level(logging.INFO):
        assert choose_backend(10**7) == picked
    assert f"backend {picked}" in caplog.text


def test_faiss_threads_of_the_caller_are_left_alone():
    before = faiss.omp_get_max_threads()
    nearest(np.eye(4, dtype=np.float32), np.eye(4, dtype=np.float32))
    assert faiss.omp_get_max_threads() == before
