"""Models as users write them, and mistakes as users make them: what `tune.factories:NAME` names in the tests."""

import os
import subprocess
import sys
from types import SimpleNamespace

import torch
from torch import nn


class Classifier(nn.Module):
    """Takes its batch by position or by name; `give` says how it returns its loss."""

    def __init__(self, give=lambda loss: loss):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
        self.give = give

    def forward(self, features, labels):
        return self.give(nn.functional.cross_entropy(self.body(features), labels))


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 6)

    def forward(self, features):
        return (self.body(features) - features).square().mean()


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)

    def forward(self, tokens, mask):
        logits = self.head(self.embedding(tokens[:, :-1]))
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return SimpleNamespace(loss=(losses * mask[:, 1:].flatten()).mean(), logits=logits)


def sized(rows=2, p=0.0, name="", flag=False):
    body = nn.Sequential(nn.Linear(8, 8), nn.Dropout(p), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8))

    class Squared(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = body

        def forward(self, x):
            return (x + self.body(x)).square().mean()

    return Squared(), torch.randn(rows, 8)


def _rows():
    return torch.randn(8, 6), torch.randint(4, (8,))


def tensor():
    return Autoencoder(), torch.randn(8, 6)


def pair():
    return Classifier(), _rows()


def named():
    return Classifier(lambda loss: {"loss": loss}), dict(zip(("features", "labels"), _rows(), strict=True))


def with_attribute():
    return LanguageModel(), [torch.randint(32, (4, 9)), torch.ones(4, 9, dtype=torch.bool)]


def half():
    """Weights and features in other dtypes than any precision gives."""
    model, (features, labels) = pair()
    return model.half(), (features.double(), labels)


def logits_and_loss():
    """As many write it."""
    model = Classifier(lambda loss: (torch.zeros(8, 4), loss))
    return model, _rows()


def images():
    """Bytes with channels and sides: no tokens."""

    class Pixels(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3 * 5 * 5, 4)

        def forward(self, pixels, labels):
            return nn.functional.cross_entropy(self.head(pixels.flatten(1).float() / 255), labels)

    return Pixels(), (torch.randint(256, (4, 3, 5, 5), dtype=torch.uint8), torch.randint(4, (4,)))


def talks():
    """Writes what looks like events wherever it can."""
    event = '{"event": "result", "outcome": "done", "error": null, "value": {}}'

    def give(loss):
        print(event, flush=True)
        os.write(1, event.encode() + b"\n")
        sys.__stdout__.write(event + "\n")
        subprocess.run([sys.executable, "-c", f"print({event!r})"], check=True)
        assert sys.stdin.read() == ""  # waits for nobody
        return loss

    return Classifier(give), _rows()


def _after(steps, what):
    """A model that trains for some steps, and then something happens to its loss."""
    done = []

    def give(loss):
        done.append(loss)
        return what(loss) if len(done) > steps else loss

    return Classifier(give), _rows()


def not_a_number():
    return _after(2, lambda loss: loss * float("nan"))


def _raise(error):
    raise error


def starves():
    return _after(2, lambda loss: _raise(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")))


def starves_on_the_host():
    return _after(2, lambda loss: torch.empty(2**50))


def starves_at_once():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")


def fails():
    return _after(2, lambda loss: _raise(RuntimeError("the third step is cursed\nby a second line")))


# Mistakes

nothing_to_call = 3


def raises():
    raise RuntimeError("no such file\nnor line")


def leaves():
    sys.exit(3)


def returns_nothing():
    return None


def returns_one():
    return Classifier()


def returns_them_the_wrong_way_round():
    return _rows(), Classifier()


def returns_a_number_as_batch():
    return Classifier(), 5


def returns_names_of_numbers():
    return Classifier(), {"features": torch.ones(2, 6), "labels": 3}


def is_frozen():
    return Classifier().requires_grad_(False), (torch.randn(4, 6), torch.zeros(4, dtype=torch.int64))


def is_nowhere():
    return Classifier().to("meta"), (torch.randn(4, 6, device="meta"), torch.zeros(4, dtype=torch.int64, device="meta"))


def has_no_parameters():
    return nn.GELU(), torch.ones(2)


def has_no_batch():
    return Classifier(), ()


def has_no_rows():
    return Classifier(), (torch.ones(0, 6), torch.ones(0, dtype=torch.long))


def has_its_batch_elsewhere():
    features, labels = _rows()
    return Classifier(), (features.to("meta"), labels)


def is_in_two_places():
    model, batch = pair()
    model.body[0].to("meta")
    return model, batch


def has_rows_that_differ():
    model, (features, labels) = pair()
    return model, (features, labels, torch.ones(3))


def returns_logits():
    return Classifier(lambda loss: loss.expand(8)), _rows()


def returns_no_loss():
    return Classifier(lambda loss: {"logits": loss}), _rows()


def returns_a_loss_without_gradient():
    return Classifier(lambda loss: loss.detach()), _rows()


def returns_two_losses():
    return Classifier(lambda loss: (loss, 2 * loss)), _rows()


def returns_logits_in_a_tuple():
    return Classifier(lambda loss: (loss.expand(8), None)), _rows()


def fails_at_once():
    features, labels = _rows()
    return Classifier(), (features[:, :5], labels)


def is_not_a_number_at_once():
    return _after(0, lambda loss: loss * float("nan"))


def starves_in_its_first_step():
    return _after(0, lambda loss: _raise(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")))
