"""Settings of every test process: quiet TensorFlow, no accelerator, few threads."""

import os

from tests.helpers.environment import QUIET

for _name, _value in QUIET.items():
    os.environ.setdefault(_name, _value)
