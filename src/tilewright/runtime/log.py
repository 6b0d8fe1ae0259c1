"""The logger of the ops.

`TILEWRIGHT_LOG=debug` prints what is compiled, loaded from disk or searched, and how long it takes;
`TILEWRIGHT_LOG=paths` which path each op takes, and why. Programs with logging of their own find the same records under
the name `tilewright`.
"""

from __future__ import annotations

import logging
import os

log = logging.getLogger("tilewright")
LOGS_PATHS = os.environ.get("TILEWRIGHT_LOG", "").lower() == "paths"

if _level := os.environ.get("TILEWRIGHT_LOG"):
    _handler = logging.StreamHandler()
    _handler.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(name)s: %(message)s", "%H:%M:%S"))
    log.addHandler(_handler)
    if LOGS_PATHS:
        log.setLevel(logging.INFO)
    elif isinstance(logging.getLevelName(_level.upper()), int):
        log.setLevel(_level.upper())
    else:
        log.warning("TILEWRIGHT_LOG is %r; give paths, debug, info, warning or error.", _level)
