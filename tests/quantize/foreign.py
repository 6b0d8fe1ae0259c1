"""Folders as others write them: codes, zero points and scales packed word by word, as their formats say."""

import json

import torch
from safetensors.torch import save_file

from tilewright.quantize.formats.awq import ORDER

WIDE = 2**32


def pack(codes, dimension, order=range(8)):
    """Eight codes a word, along a dimension."""
    rows = codes.movedim(dimension, -1).unflatten(-1, (-1, 8)).long()
    words = sum(rows[..., code] << 4 * place for place, code in enumerate(order))
    return torch.where(words >= WIDE // 2, words - WIDE, words).to(torch.int32).movedim(-1, dimension)


def numbers(inputs=256, outputs=24, group=64, zeros=True):
    """(codes (in, out), zero points (groups, out), scales (groups, out)) at random."""
    torch.manual_seed(inputs + group)
    codes = torch.randint(16, (inputs, outputs))
    zero = torch.randint(16, (inputs // group, outputs)) if zeros else torch.full((inputs // group, outputs), 8)
    return codes, zero, (torch.rand(inputs // group, outputs) + 0.1).half()


def definition(codes, zero, scale, index):
    """(out, in), exact in float64."""
    return (scale.double()[index] * (codes - zero[index]).double()).t()


GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": True}
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": False}
SETTINGS = {
    "gptq": {**GPTQ, "checkpoint_format": "gptq"}, "gptq_v2, act-order": {**GPTQ, "checkpoint_format": "gptq_v2"},
    "gptq, own orders": GPTQ, "awq": {"quant_method": "awq", "bits": 4, "version": "gemm"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": WEIGHTS, "input_activations": None, "targets": ["Linear"]}},
        "ignore": ["lm_head"],
    },
}  # fmt: skip


def write_foreign(folder, model, kind):
    """Write a Llama's folder as `kind` has it, and give the model the weights that the folder stands for.

    Each weight is rounded to groups of 64. Scales are float16; the other tensors are as they are.
    """
    tensors, generator = {}, torch.Generator().manual_seed(0)
    same = torch.randperm(128, generator=generator)
    for name, module in model.named_modules():
        if type(module) is not torch.nn.Linear or name == "lm_head":
            continue
        weight = module.weight.detach().t().double()
        inputs = len(weight)
        order = torch.arange(inputs)
        if "order" in kind:
            shared = "own" not in kind and inputs == 128
            order = same if shared else torch.randperm(inputs, generator=generator)
        index = torch.empty(inputs, dtype=torch.long)
        index[order] = torch.arange(inputs) // 64
        low, high = (
            torch.stack([pick(weight[index == group], 0).values for group in range(inputs // 64)])
            for pick in (torch.min, torch.max)
        )
        scale = ((high - low) / 15).half()
        zero = (-low / scale.double()).round().clamp(0, 15).long()
        codes = (weight / scale.double()[index] + zero[index]).round().clamp(0, 15).long()
        module.weight.data = definition(codes, zero, scale, index).to(module.weight.dtype).contiguous()
        tensors |= {
            f"{name}.{key}": each.contiguous() for key, each in _stored(kind, codes, zero, scale, index).items()
        }
        if kind == "gptq":  # as AutoGPTQ, whatever the model has
            tensors[f"{name}.bias"] = torch.zeros(module.out_features, dtype=module.weight.dtype)
    named = {f"{name}.weight" for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    tensors |= {key: each for key, each in model.state_dict().items() if key not in named - {"lm_head.weight"}}
    folder.mkdir(exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
    config = {**json.loads(model.config.to_json_string(use_diff=False)), "quantization_config": SETTINGS[kind]}
    (folder / "config.json").write_text(json.dumps(config))


def _stored(kind, codes, zero, scale, index):
    if kind == "awq":
        return {"qweight": pack(codes, 1, ORDER), "qzeros": pack(zero, 1, ORDER), "scales": scale}
    if kind == "compressed-tensors":
        return {
            "weight_packed": pack(codes, 0).t(), "weight_scale": scale.t(), "weight_zero_point": pack(zero, 1).t(),
            "weight_shape": torch.tensor(codes.t().shape),
        }  # fmt: skip
    zero = zero if "v2" in kind else (zero - 1) & 15
    return {"qweight": pack(codes, 0), "qzeros": pack(zero, 1), "scales": scale, "g_idx": index.int()}
