"""Compiles the C++ and CUDA libraries into the wheel, where TILEWRIGHT_BUILD_EXT=1 asks for it.

    TILEWRIGHT_BUILD_EXT=1 pip install --no-build-isolation .

They are for the torch that is installed here and for this machine's CPU, and the CUDA ones for its GPUs or for
TORCH_CUDA_ARCH_LIST. Elsewhere they are not found, and the first call compiles its own.
"""

import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PrebuiltHook(BuildHookInterface):
    """Adds the libraries to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile them; a compiler's error ends the build."""
        if os.environ.get("TILEWRIGHT_BUILD_EXT") != "1":
            return
        if version == "editable":
            sys.exit("TILEWRIGHT_BUILD_EXT=1 puts libraries into a wheel: leave out -e, or leave it unset.")
        sys.path.insert(0, str(Path(self.root, "src")))
        from tilewright.ops.self_attention.op import CPU, CUDA  # importing torch, which a plain build does without
        from tilewright.runtime.extension import architectures, has_cuda

        self.folder = tempfile.TemporaryDirectory()
        wanted = [CPU, CUDA] if has_cuda() and architectures() else [CPU]
        for extension in wanted:
            path = Path(self.folder.name, extension.file_name())
            path.write_bytes(extension.code())
            build_data["force_include"][str(path)] = f"tilewright/prebuilt/{path.name}"
        # No part of Python's ABI is in them.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data.update(pure_python=False, tag=f"py3-none-{platform}")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled."""
        if hasattr(self, "folder"):
            self.folder.cleanup()
