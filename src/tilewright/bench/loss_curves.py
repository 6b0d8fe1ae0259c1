"""Two hundred steps of a small GPT on real text with each loss: the fused ones must stay within the noise of a seed."""

from __future__ import annotations

import torch

from tilewright.bench.protocol import Ask, Case, head
from tilewright.errors import UserError
from tilewright.measure.corpus import corpus
from tilewright.models import GPT
from tilewright.plan.gpt import CHOICES, GPTConfig

STEPS, BATCH = 200, 16
MODEL = {"width": 256, "layers": 4, "heads": 4, "vocabulary": 256, "sequence": 256, "gpt_block": "optimized"}


def _curve(text: torch.Tensor, loss: str, seed: int) -> list[float]:
    torch.manual_seed(seed)
    config = GPTConfig(**MODEL, loss=loss)  # type: ignore[arg-type]
    model = GPT(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    window = torch.arange(config.sequence + 1)
    order = torch.Generator().manual_seed(0)
    values = []
    for _ in range(STEPS):
        starts = torch.randint(len(text) - len(window), (BATCH, 1), generator=order)
        batch = text[starts + window].cuda()
        with torch.autocast("cuda", torch.bfloat16):
            value = model(batch[:, :-1], batch[:, 1:])
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(value.item())
    return values


def run(ask: Ask) -> Case:
    """Train with every loss on one seed and with the plain one on another."""
    if ask.only:
        raise UserError("loss_curves compares all of its runs with each other: leave out --only.")
    result = head("loss_curves", ask)
    text = torch.frombuffer(bytearray(corpus(1 << 22)), dtype=torch.uint8).long()
    result.update(steps=STEPS, batch=BATCH, model=MODEL, curves={})
    runs = [("plain, another seed", "plain", 1), *((loss, loss, 0) for loss in CHOICES["loss"])]
    for name, loss, seed in runs:
        result["curves"][name] = _curve(text, loss, seed)
        ask.progress(f"{name}: {result['curves'][name][0]:.3f} to {result['curves'][name][-1]:.3f}")
        ask.save(result)
    plain = torch.tensor(result["curves"]["plain"])
    result["largest_difference_from_plain"] = {
        name: (torch.tensor(curve) - plain).abs().max().item() for name, curve in result["curves"].items()
    }
    ask.progress(str(result["largest_difference_from_plain"]))
    ask.save(result)
    return result
