"""Ranks whose environment is not the usual one: a locale, settings that differ."""

import subprocess
import textwrap

import pytest

from tests.helpers.launching import launch_script

LIMIT_S = 90  # starting TensorFlow on a loaded machine takes most of it
COMMA = """\
LC_NUMERIC
decimal_point ","
thousands_sep ""
grouping -1
END LC_NUMERIC
"""


def _comma_locale(folder):
    """Make a locale with a decimal comma in a folder; return the variables that choose it."""
    others = ("CTYPE", "COLLATE", "TIME", "MONETARY", "MESSAGES")
    copied = "".join(f'LC_{name}\ncopy "POSIX"\nEND LC_{name}\n' for name in others)
    (folder / "comma").write_text(COMMA + copied)
    command = ["localedef", "-c", "-i", "./comma", "-f", "UTF-8", str(folder / "comma.UTF-8")]
    subprocess.run(command, cwd=folder, capture_output=True)  # its status: 1 after any warning
    if not (folder / "comma.UTF-8" / "LC_NUMERIC").exists():
        pytest.skip("localedef needs the character maps of Debian's package `locales`")
    return {"LOCPATH": str(folder), "LC_ALL": "comma.UTF-8"}


@pytest.mark.timeout(LIMIT_S + 30)
def test_a_decimal_comma_changes_no_factor(tmp_path):
    script = """
        import locale
        import numpy as np
        import tensorflow as tf
        import tfscale, tfscale.keras as hvd
        locale.setlocale(locale.LC_NUMERIC, "")
        assert locale.localeconv()["decimal_point"] == ","
        hvd.init()
        mean = hvd.allreduce(tf.constant([1.0, 4.0]) * (hvd.rank() + 1), prescale_factor=0.5)
        np.testing.assert_array_equal(mean, [0.75, 3.0])
        """
    result = launch_script(2, textwrap.dedent(script), LIMIT_S, _comma_locale(tmp_path))
    assert result.exit_code == 0, result.output


@pytest.mark.timeout(LIMIT_S + 30)
def test_messages_of_other_lengths_on_one_rank_are_refused_on_all():
    script = """
        import os
        if os.environ["PMI_RANK"] == "1":
            os.environ["TFSCALE_CHUNK_BYTES"] = "123456"
        import tfscale
        try:
            tfscale.init()
        except tfscale.ExchangeError as error:
            print("REFUSED", error, flush=True)
        """
    result = launch_script(2, textwrap.dedent(script), LIMIT_S)
    assert result.output.count("REFUSED All ranks must run the same versions with the same") == 2
    assert "chunks of 123456" in result.output, result.output
