"""The Phantom data set: right ellipses, equal for equal seeds, safe to make in many processes."""

import subprocess
import sys

import numpy as np
import pytest
from datasets import phantom


def _pixel_by_pixel(ellipses, size):
    """Sum of grey values in tenths, from the definition of an ellipse."""
    centres = (2 * np.arange(size) + 1) / size - 1
    x, y = np.meshgrid(centres, -centres)
    total = np.zeros((size, size))
    for grey, x0, y0, a, b, degrees in ellipses:
        angle = np.deg2rad(degrees)
        along = (x - x0) * np.cos(angle) + (y - y0) * np.sin(angle)
        across = -(x - x0) * np.sin(angle) + (y - y0) * np.cos(angle)
        total += grey * ((along / a) ** 2 + (across / b) ** 2 <= 1)
    return np.round(np.clip(total, 0, 10) * 25.5)


@pytest.mark.parametrize("size", [1, 7, 64, 256])
def test_pictures_are_those_of_the_definition(size):
    ellipses = phantom.random_ellipses(3, seed=5)
    expected = np.stack([_pixel_by_pixel(e, size) for e in ellipses])
    np.testing.assert_array_equal(phantom.draw_ellipses(ellipses, size), expected)


def test_the_classical_phantom_has_its_known_values():
    picture = phantom.draw_ellipses(phantom.SHEPP_LOGAN[None], 256)[0]
    assert picture[0, 0] == 0  # outside
    assert picture[10:14, 128].max() == 255  # skull, top
    assert picture[180, 128] == 51  # brain, 0.2
    assert picture[128, 156] == 0  # right ventricle
    assert picture[83, 128] in (76, 77)  # the large lesion, 0.3


def test_equal_seeds_give_equal_pictures_and_a_longer_set_starts_with_the_shorter():
    few, many = phantom.phantoms(3, size=64, seed=9), phantom.phantoms(70, size=64, seed=9)
    np.testing.assert_array_equal(few, many[:3])
    assert (phantom.phantoms(3, size=64, seed=10) != few).any()


def test_cache_is_used_and_a_damaged_file_is_made_again(tmp_path):
    def load():
        return phantom.load_phantoms(4, size=32, seed=1, cache_dir=tmp_path)

    first = load()
    (file,) = tmp_path.glob("*.npz")
    np.savez_compressed(file, pictures=first + 1)
    np.testing.assert_array_equal(load(), first + 1)
    for damage in (file.read_bytes()[:100], b""):
        file.write_bytes(damage)
        np.testing.assert_array_equal(load(), first)
    assert list(tmp_path.glob("*.npz")) == [file]


def test_several_processes_may_start_at_once(tmp_path):
    # The file alone, by its path: it needs numpy only, so the processes start fast and together.
    code = "import runpy, sys; made = runpy.run_path(sys.argv[1])['load_phantoms'];"
    code += "print(made(300, size=128, seed=4, cache_dir=sys.argv[2]).sum())"
    command = [sys.executable, "-c", code, phantom.__file__, tmp_path]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert set(outputs) == {f"{phantom.phantoms(300, size=128, seed=4).sum()}\n"}
    assert len(list(tmp_path.glob("*.npz"))) == 1
