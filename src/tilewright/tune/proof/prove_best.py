"""The proof of a study's best run: what turns out wrong is struck, and the next is proved."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tilewright.tune.proof.verdict import at_its_own_size
from tilewright.tune.search.generating import GeneratingSpace
from tilewright.tune.search.known import Known
from tilewright.tune.search.reserve import Reserve
from tilewright.tune.search.space import Point
from tilewright.tune.settings import Settings
from tilewright.tune.store.proof import VERDICTS, Proof
from tilewright.tune.store.record import Record, key, note_of

_PROOFS = 3  # runs that may turn out wrong before the study gives up
_LEAST_PROOF = 5.0  # seconds: with less nothing would come of it

Prove = Callable[[Point, float, float, Callable[[Proof], None]], Proof]  # as `Jobs.prove`


class BestProver:
    """Proves the best run of a study, once each.

    Args:
        settings: of the study.
        known: the trials; proofs and what is wrong go into it.
        reserve: the time there is.
        prove: proves one run.
        heed: raises where somebody has asked to stop.
        say: prints a line.
    """

    def __init__(
        self, settings: Settings, known: Known, reserve: Reserve, *, prove: Prove, heed: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._settings, self._known, self._reserve = settings, known, reserve
        self._prove, self._heed, self._say = prove, heed, say

    def prove(self) -> None:
        """Prove the best; one that was found later, with no time to prove it, leaves the proof as it is."""
        known, pace = self._known, self._reserve.pace
        takes = self._reserve.must_take() + self._reserve.observing_takes()
        if any(map(_is_sound, known.proofs.values())) and pace.left < takes:
            return
        if known.has_baseline_only():
            return  # there is nothing but the baseline, which is proved only where something was compared with it
        for attempt in range(_PROOFS - sum(proof.verdict == "wrong" for proof in known.proofs.values())):
            self._heed()
            known.read()
            best = known.best()
            if best is None or key(best.point) in known.proofs or self._is_noted(best):
                return
            if (limit := pace.most) < _LEAST_PROOF:
                if not attempt:
                    why = "no time was left to prove it; --resume with more --budget does."
                    known.proofs[key(best.point)] = Proof("not proven", why)
                return
            if self._prove_one(best, limit):
                return

    def note(self, best: Record, proof: Proof) -> None:
        """Keep a proof for the readers of the study; another worker may have had more time."""
        name, ledger = note_of("proof", best), self._known.ledger
        if proof.verdict != "not proven" or ledger.noted(name) is None:
            ledger.note(name, dataclasses.asdict(proof))

    def _is_noted(self, best: Record) -> bool:
        """Whether another worker has proved the best, or this study on another day; its proof is taken over."""
        noted = self._known.ledger.noted(note_of("proof", best))
        if noted is None or not _is_sound(proof := Proof.from_dict(noted)):
            return False
        self._known.proofs[key(best.point)] = proof
        return True

    def _prove_one(self, best: Record, limit: float) -> bool:
        """Prove a run in as many seconds; whether it is not wrong."""
        known = self._known

        def told(proof: Proof) -> None:
            known.proofs[key(best.point)] = self._at_its_own_size(best, proof)

        # The losses in float32 come in the same process, and only now: nothing better is to be done with the time.
        proof = self._prove(best.point, limit, self._reserve.curve(), told)
        told(proof)
        own = known.proofs[key(best.point)]
        self.note(best, own)
        if proof.curve or proof.no_curve:
            found: dict[str, Any] = {"float32_losses": proof.curve}
            known.ledger.note("float32", found if proof.curve else {"no_float32": proof.no_curve})
        if own.verdict != "wrong":
            return True
        self._say(f"{known.space.label(best.point)} is wrong and not recommended: {own.why}")
        known.wrong.add(key(best.point))
        # Others that show the same need no proof of their own.
        known.wrong |= {key(r.point) for r in known.records if self._at_its_own_size(r, proof) is not proof}
        if fault := own.at_fault:
            known.wrong |= {key(r.point) for r in known.records if r.point.get(fault) == best.point.get(fault)}
        known.read_wrong()
        known.ledger.note("wrong", sorted(known.wrong))
        return False

    def _at_its_own_size(self, record: Record, proof: Proof) -> Proof:
        """The proof, or that a run is wrong at its own batch; where something is drawn by chance, nobody can tell."""
        records = self._known.records
        reference = next((r for r in records if r.purpose == "reference" and r.outcome == "done"), None)
        if isinstance(self._settings.space, GeneratingSpace):  # whose trials have no losses
            return proof
        own = self._settings.machine.get("own_model", {}).get("draws", True)
        drawn = own if self._settings.own_model else self._settings.space.start.model.dropout > 0
        if drawn or reference is None or not reference.measurement:
            return proof
        for run in records:  # a second one of the same run may have had fewer steps
            if run.point == record.point and run.measurement is not None:
                found = at_its_own_size(proof, reference.measurement.losses, run.measurement.losses)
                if found is not proof:
                    return found
        return proof


def _is_sound(proof: Proof) -> bool:
    return proof.verdict in VERDICTS[:3]
