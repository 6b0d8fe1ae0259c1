"""What stands on a CPU for the kernels of `gelu_mlp` and `glu_mlp`: the same results in PyTorch."""

import torch
import torch.nn.functional as F


def activate(z, activation):
    """The activation and its slope, in float32."""
    if activation == "silu":
        sigmoid = z.sigmoid()
        return z * sigmoid, sigmoid + z * sigmoid * (1 - sigmoid)
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    slope = torch.ops.aten.gelu_backward(torch.ones_like(z), z, approximate=approximate)
    return F.gelu(z, approximate=approximate), slope


def _gelu(z, erf):
    return activate(z, "gelu" if erf else "gelu_tanh")


def gelu_value(x, up, bias, lean, erf):
    with torch.autocast(x.device.type, enabled=False):
        z = x.detach().float() @ up.detach().float().t() + (0.0 if bias is None else bias)
        out, slope = _gelu(z.to(x.dtype).float() if lean else z, erf)
        return out.to(x.dtype), z.to(x.dtype) if lean else slope.to(x.dtype)


def gelu_gradient(dy, down, kept, lean, erf):
    with torch.autocast(dy.device.type, enabled=False):
        again, slope = _gelu(kept.float(), erf) if lean else (None, kept.float())
        out = dy.float() @ down.detach().float() * slope
        return out.to(dy.dtype), out.sum(0), again.to(dy.dtype) if lean else None


def glu_value(x, gate, up, activation):
    with torch.autocast(x.device.type, enabled=False):
        g, u = ((x.float() @ weight.float().t()).to(x.dtype) for weight in (gate, up))
        return g, u, (activate(g.float(), activation)[0] * u.float()).to(x.dtype)


def glu_gradient(dy, down, g, u, activation):
    with torch.autocast(dy.device.type, enabled=False):
        d, (value, slope) = dy.float() @ down.float(), activate(g.float(), activation)
        return (d * u.float() * slope).to(dy.dtype), (d * value).to(dy.dtype)
