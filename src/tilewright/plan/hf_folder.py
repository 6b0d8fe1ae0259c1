"""A local Hugging Face folder, checked before anything is imported, allocated or run.

Nothing of the folder is run: its code is never trusted, pickles are never read, and the network is never asked.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

from tilewright.errors import UserError

_LARGEST = 1 << 20  # bytes of a config.json
_CAUSAL = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"  # as transformers calls its table of causal language models


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds no causal language model which transformers knows and which is safe to build."""
    family = _read(folder).get("model_type")
    known = _families()
    if not isinstance(family, str) or (known and family not in known):
        raise UserError(
            f"{folder}/config.json is of the family {family!r}, which this transformers has no causal language model "
            "for; write a factory for it and use --model."
        )


def _families() -> set[str]:
    """The families of causal language models, out of the source of transformers; empty where it is written otherwise.

    To import it takes seconds.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise UserError("--hf needs transformers: pip install 'tilewright[hf]'.")
    try:
        tree = ast.parse((Path(spec.origin).parent / "models/auto/modeling_auto.py").read_bytes())
    except (OSError, SyntaxError):
        return set()
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and _CAUSAL in (getattr(target, "id", "") for target in node.targets):
            pairs = (each.elts[0] for each in ast.walk(node) if isinstance(each, ast.Tuple) and len(each.elts) == 2)
            found |= {str(each.value) for each in pairs if isinstance(each, ast.Constant)}
    return found


def _read(folder: Path) -> dict[str, Any]:
    """The config.json of a folder, as plain data."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise UserError(
            f"{folder} is no folder, and nothing is downloaded; give the folder that holds a model's config.json."
        )
    if not path.is_file():
        raise UserError(f"{folder} has no config.json; give the folder that holds a model's.")
    if path.stat().st_size > _LARGEST:
        raise UserError(f"{path} has more than {_LARGEST:,} bytes, which is no config.json.")
    pickles = sorted(each.name for each in folder.iterdir() if each.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickles and not any(folder.glob("*.safetensors")):
        raise UserError(f"{folder} has its weights in {pickles[0]}, a pickle, which is not read; save safetensors.")
    try:
        config = json.loads(path.read_text("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{path} is no JSON; save the model again.") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} holds no JSON object; save the model again.")
    if (folder / "adapter_config.json").is_file():
        raise UserError(f"{folder} holds an adapter; give the folder of the model it is for.")
    if (named := _code_named_in(config)) is not None:
        raise UserError(f"{path} asks for code from elsewhere, {named!r:.100}, which is not run; leave that out of it.")
    if config.get("quantization_config"):
        raise UserError(f"{path} describes quantised weights, which are not trained; give the folder they came from.")
    return config


def _code_named_in(value: Any) -> str | None:
    """An implementation that a configuration names by a path of a hub; None where it names none."""
    if isinstance(value, dict):
        for name, each in value.items():
            if "implementation" in str(name) and isinstance(each, str) and "/" in each:
                return each
            if (found := _code_named_in(each)) is not None:
                return found
    elif isinstance(value, list):
        return next((found for each in value if (found := _code_named_in(each)) is not None), None)
    return None
