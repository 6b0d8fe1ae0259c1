"""The tensors of a folder that is written piece by piece: one safetensors file, or several and an index."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from tilewright.measure.results import write_json
from tilewright.models.folder import INDEX

SHARD = 2 << 30  # bytes of a file, which are in memory until it is written


class FolderWriter:
    """Keeps tensors until there are enough for a file; `metadata` is that of each.

    >>> import tempfile, torch
    >>> folder = Path(tempfile.mkdtemp())
    >>> writer = FolderWriter(folder, {"format": "pt"}, shard=100)
    >>> for name in ("a", "b", "c"):
    ...     writer.add(name, torch.zeros(20))
    >>> writer.finish()
    >>> sorted(path.name for path in folder.iterdir())[0], writer.bytes
    ('model-00001-of-00003.safetensors', 240)
    """

    def __init__(self, folder: Path, metadata: Mapping[str, str], shard: int = SHARD) -> None:
        self.folder, self.bytes = folder, 0
        self._metadata, self._shard = dict(metadata), shard
        self._waiting = dict[str, Tensor]()
        self._written: list[tuple[Path, list[str]]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor, and write those before it where they fill a file with it."""
        if self._waiting and sum(each.nbytes for each in self._waiting.values()) + tensor.nbytes > self._shard:
            self._write()
        # A copy, so that nothing holds the memory of the file that it comes from.
        self._waiting[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self.bytes += tensor.nbytes

    def finish(self) -> None:
        """Write the rest, and give all files their names."""
        self._write()
        total = len(self._written)
        index: dict[str, str] = {}
        for number, (path, names) in enumerate(self._written, 1):
            last = f"model-{number:05d}-of-{total:05d}.safetensors" if total > 1 else "model.safetensors"
            path.rename(self.folder / last)
            index |= dict.fromkeys(names, last)
        if total > 1:
            write_json(self.folder / INDEX, {"metadata": {"total_size": self.bytes}, "weight_map": index})

    def _write(self) -> None:
        from safetensors.torch import save_file

        path = self.folder / f"part-{len(self._written)}"
        save_file(self._waiting, path, metadata=self._metadata)
        self._written.append((path, list(self._waiting)))
        self._waiting = {}
