import numpy as np
import pytest

from tessera_core.profile.model.neighbours import Neighbours, neighbours
from tessera_core.profile.model.tables import half_widths


def grid(noise: float = 0.0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    n, m = (2.0 ** column.ravel() for column in np.meshgrid(np.arange(6, 14), np.arange(0, 12)))
    values = 0.1 * np.log2(n) - 0.5 + noise * np.random.default_rng(0).standard_normal(len(n))
    return {"n": n, "m": m}, values


def made(noise: float = 0.0) -> Neighbours:
    sizes, values = grid(noise)
    return neighbours(sizes, ("n", "m"), lambda index: values[index])


def test_a_smooth_residual_is_found_between_the_points() -> None:
    found = made().at({"n": np.array([1448.0]), "m": np.array([90.0])})
    assert found.residual.item() == pytest.approx(0.1 * np.log2(1448) - 0.5, abs=0.05)
    assert 0.9 < found.near.item() <= 1


def test_nothing_is_said_far_away() -> None:
    found = made().at({"n": np.array([2.0**60]), "m": np.array([2.0**60])})
    assert found.residual.item() == pytest.approx(0, abs=1e-6)
    assert found.near.item() == pytest.approx(0, abs=1e-6)
    assert half_widths(found, 1.0, 0.5).item() >= 0.5


def test_scatter_is_what_the_points_scatter_by() -> None:
    asked = {"n": np.array([1000.0]), "m": np.array([100.0])}
    calm, rough = made(0.01).at(asked).scatter.item(), made(0.2).at(asked).scatter.item()
    assert rough > 2 * calm  # what is smooth but sloped counts as well
    assert 0.08 < rough < 0.4  # a mean absolute deviation of 0.16, and what the others' noise adds


def test_many_sizes_at_once_are_as_one_by_one() -> None:
    known = made(0.1)
    sizes = {"n": np.array([100.0, 5000.0, 333.0]), "m": np.array([1.0, 7.0, 2000.0])}
    together = known.at(sizes)
    for row in range(3):
        alone = known.at({name: column[row : row + 1] for name, column in sizes.items()})
        assert alone.residual.item() == pytest.approx(together.residual[row])
        assert alone.scatter.item() == pytest.approx(together.scatter[row])


def test_fewer_points_than_are_usually_asked_will_do() -> None:
    known = neighbours({"m": np.array([1.0, 2.0])}, ("m",), lambda index: np.array([0.3, 0.3])[index])
    assert 0 < known.at({"m": np.array([1.5])}).residual.item() <= 0.3
