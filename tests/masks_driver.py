"""make_masks.py with SAM at 128 pixels, where a frame takes a tenth of a second on a CPU; takes its arguments."""

from dataclasses import replace

import make_masks
from common.cli import cli

cli(lambda args: make_masks.main(replace(args, image_size=128)), make_masks.Args())
