"""What else reads skips works where they are joined inline: the monitor and the κ advisor."""

from __future__ import annotations

import copy

import pytest
import torch

from families.crossing import PushedTwice
from families.unknown import InlineAdd
from scalelong import find_skips, scale_skips
from scalelong.kappa import kappa_band, measure_gain, suggest_kappa
from scalelong.kappa.advisor import solve_kappa
from scalelong.diffusion import LinearSchedule
from scalelong.monitor import Monitor
