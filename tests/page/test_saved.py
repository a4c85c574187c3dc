"""Responses in files: of every form, opened, saved, picked, or refused with a sentence."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from routed_experts.protocol.codec import encode
from routed_experts.protocol.collect import collect
from routed_experts.protocol.saved import ModelInfo, read
from routed_experts.server.cli.saved import opened
from routed_experts.server.cli.view import ViewServer
from tests.e2e.harness import ASK, Server
from tests.page.answers import answer, array, rows_of, weights_of
from tests.page.browser import Tab
from tests.page.conftest import Viewed
from tests.page.seen import TIMES, TOKENS, choose, download, ended, error_in, show, shows

pytestmark = pytest.mark.e2e

INFO = {"num_layers": 3, "top_k": 2, "num_experts": 40, "layer_ids": [1, 2, 5]}
SHOWN = "[...$$('#tokens-a .token'), ...$$('#detail th'), $('#summary')].map(e => e.className + e.textContent)"
