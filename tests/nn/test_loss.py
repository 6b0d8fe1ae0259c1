import pytest
import torch

from ops.contract import DEVICE
from tilewright.nn import CrossEntropyLoss, LinearCrossEntropyLoss


def with_gradients(function, *leaves):
    loss = function(*leaves)
    return [loss, *torch.autograd.grad(loss.sum(), leaves)]


def test_cross_entropy_is_torchs_module_and_takes_its_checkpoint():
    logits = torch.randn(5, 12, device=DEVICE, requires_grad=True)
    targets = torch.tensor([3, 0, 7, 11, -1], device=DEVICE)
    for options in ({}, {"label_smoothing": 0.2, "reduction": "sum"}, {"reduction": "none"}):
        torchs = torch.nn.CrossEntropyLoss(torch.rand(12, device=DEVICE), ignore_index=-1, **options)
        ours = CrossEntropyLoss(torch.ones(12, device=DEVICE), ignore_index=-1, **options)
        ours.load_state_dict(torchs.state_dict())
        expected = with_gradients(lambda x, f=torchs: f(x, targets), logits)
        for a, e in zip(with_gradients(lambda x, f=ours: f(x, targets), logits), expected, strict=True):
            torch.testing.assert_close(a, e)
    assert not CrossEntropyLoss().state_dict() and "label_smoothing=0.2" in repr(CrossEntropyLoss(label_smoothing=0.2))


def test_what_torchs_module_does_not_have_reaches_the_op():
    logits, targets = torch.randn(4, 9, device=DEVICE), torch.tensor([1, 2, 3, 4], device=DEVICE)
    plain, more = CrossEntropyLoss(), CrossEntropyLoss(z_loss=0.1, softcap=2.0, inplace=True)
    bent = 2.0 * torch.tanh(logits / 2.0)
    expected = plain(bent, targets) + 0.1 * (torch.logsumexp(bent, -1) ** 2).mean()
    torch.testing.assert_close(more(logits.clone(), targets), expected)


@pytest.mark.parametrize("bias", [False, True])
def test_a_classifier_is_a_linear_layer_and_its_loss(bias):
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 24, bias=bias, device=DEVICE)
    head = LinearCrossEntropyLoss(16, 24, bias, ignore_index=2, label_smoothing=0.1, memory=2048).to(DEVICE)
    head.load_state_dict(layer.state_dict())
    x = torch.randn(3, 20, 16, device=DEVICE, requires_grad=True)
    targets = torch.randint(24, (3, 20), device=DEVICE)
    torch.testing.assert_close(head(x), layer(x))
    actual = torch.autograd.grad(head(x, targets), [x, *head.parameters()])
    loss = torch.nn.CrossEntropyLoss(ignore_index=2, label_smoothing=0.1)
    expected = torch.autograd.grad(loss(layer(x).mT, targets), [x, *layer.parameters()])
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)
    assert "memory=2048" in repr(head)


def test_a_classifier_tied_to_an_embedding_gives_it_both_gradients():
    embedding = torch.nn.Embedding(24, 16, device=DEVICE)
    head = LinearCrossEntropyLoss(16, 24)
    head.weight = embedding.weight
    tokens = torch.randint(24, (2, 6), device=DEVICE)
    (actual,) = torch.autograd.grad(head(embedding(tokens), tokens), [embedding.weight])
    logits = embedding(tokens) @ embedding.weight.t()
    (expected,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits.mT, tokens), [embedding.weight])
    torch.testing.assert_close(actual, expected)
