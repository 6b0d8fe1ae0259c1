"""What ranks send each other in a step, and how much of the time that takes nothing hides.

A collective over r ranks is a ring: each rank sends (r - 1)/r of the tensor, in r - 1 rounds. Where the ring crosses
nodes, the ranks of a group that share a node share their cards to the network, and a round takes the latency of one.

    FSDP      a layer's weights are gathered while the layer before it computes, in forward and in backward; its
              gradients are scattered while the next one computes. In the open: the first gather, the last scatter, what
              is longer than the computing, and what copies take from the computing beside them.
    DDP       gradients travel by buckets, behind the backward of the last micro batch.
    tensor    nothing hides it: two reductions a layer forward and two backward. Of a mixture's layer one of each, and
              without sequence parallel a gather more, since tokens are shared to be routed.
    pipeline  activations from stage to stage in the open, and the bubble.
    context   every rank gathers the keys and values of the whole sequence, in the open.
    experts   tokens travel to their experts and back, each by itself, in the open; ranks of tensor share both.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.plan.calibration import FITTED
from tilewright.plan.decoder import Decoder
from tilewright.plan.training import PIECES_HELD, Training, parameters_here, rank_tokens, stage_layers

LINK_SHARE = 0.75  # of a link's or a card's datasheet, what a collective reaches
BUCKET_BYTES = 25e6  # of DDP, at least; with many ranks Megatron makes them larger, for the rounds of their rings
_BUCKET_BYTES_A_RANK = 2e6


@dataclass(frozen=True)
class Links:
    """What ranks are joined by: bytes a second of a GPU, one direction."""

    node: int = 8  # GPUs
    link: float = 450e9  # to its neighbours in the node, by the datasheet
    network: float = 50e9  # between nodes
    measured_round: float | None = None  # seconds of a round between nodes; None: as fitted

    @property
    def round_seconds(self) -> float:
        """Seconds of a ring's round between nodes; within a node it takes a third."""
        return FITTED["round seconds"] if self.measured_round is None else self.measured_round

    def rate(self, ranks: int, apart: int) -> float:
        """Of a ring over so many ranks, each `apart` GPUs from the next."""
        if ranks * apart <= self.node:
            return LINK_SHARE * self.link
        return LINK_SHARE * min(self.link, self.network * max(1, self.node // apart))

    def ring(self, size: float, ranks: int, apart: int = 1) -> float:
        """Seconds of an all-gather or a reduce-scatter of a tensor of `size` bytes; an all-reduce takes two.

        >>> Links().ring(1e9, 1), Links().ring(1e9, 8) < Links().ring(1e9, 16)
        (0.0, True)
        """
        if ranks == 1:
            return 0.0
        nodes = -(-ranks * apart // self.node)
        rounds = (ranks - 1 - (nodes - 1)) / 3 + (nodes - 1)
        return size * (ranks - 1) / ranks / self.rate(ranks, apart) + rounds * self.round_seconds

    def exchange(self, size: float, ranks: int, apart: int = 1) -> float:
        """Seconds in which each of the ranks sends the others `size` bytes in all, an equal part to each.

        >>> Links().exchange(1e9, 1), Links().exchange(1e9, 8) < Links().exchange(1e9, 16)
        (0.0, True)
        """
        if ranks == 1:
            return 0.0
        near = max(1, min(ranks, self.node // apart))
        inside, outside = size * (near - 1) / ranks, size * (ranks - near) / ranks
        late = self.round_seconds * (1 if ranks > near else 1 / 3)
        return inside / (LINK_SHARE * self.link) + outside / (LINK_SHARE * self.network) + late


def reductions(decoder: Decoder, tokens: int, element_bytes: int, ranks: int, links: Links) -> float:
    """Seconds of a layer's two tensor-parallel reductions in one forward, each a scatter and a gather."""
    return 4 * links.ring(tokens * decoder.width * element_bytes, ranks)


def beside(computing: float, traffic: float) -> float:
    """Seconds that traffic adds to the computing beside it: what sticks out, and what each costs the other.

    >>> beside(1.0, 0.0), beside(0.0, 1.0), 2.0 < beside(1.0, 3.0) < 3.0
    (0.0, 1.0, True)
    """
    return max(0.0, traffic - computing) + FITTED["contention"] * min(computing, traffic)


@dataclass(frozen=True)
class Phases:
    """Seconds that one micro batch computes on a rank."""

    forward: float
    backward: float


def exposed(decoder: Decoder, training: Training, links: Links, phases: Phases) -> dict[str, float]:
    """Seconds of a step, by kind, in which ranks wait for each other."""
    found = {}
    micro_batches = training.accumulation or 1
    tokens, c = rank_tokens(decoder, training), training.compute_bytes
    t, p = training.tensor, training.pipeline
    layers = stage_layers(decoder, training)
    one = tokens * decoder.width * c
    ways = 3 if training.recompute == "full" else 2  # forward, again, and backward
    sparse = layers * (1 - decoder.dense_layers / decoder.layers)
    if t > 1:
        halves = layers + decoder.cross_layers / 2  # attention, MLP: two reductions a layer, and three where two attend
        routed = 0.0 if training.sequence_parallel else 0.25  # of a mixture's tokens, in place of its reduction
        halves -= sparse * (0.5 - routed - (0.5 if decoder.shared_ffn else 0.0)) if decoder.experts > 1 else 0.0
        found["tensor"] = micro_batches * halves * ways * reductions(decoder, tokens, c, t, links)
    if training.context > 1:  # backward gathers, too, and scatters the gradients
        keys = decoder.kv_heads_on(t) * (decoder.head_dim + decoder.values)
        of_sequence = training.context * tokens * keys * c
        found["context"] = micro_batches * layers * (ways + 1) * links.ring(of_sequence, training.context, t)
    if decoder.experts > 1 and training.sharing > 1:
        sent = links.exchange(decoder.active_experts * one / t, training.sharing)
        found["expert"] = micro_batches * sparse * ways * 2 * sent
    if p > 1:
        late = links.round_seconds / (1 if p * t > links.node else 3)
        sent = 2 * (one / t / links.rate(p, t) + late)
        found["pipeline"] = micro_batches * training.interleave * sent
        waiting = sum(found.get(kind, 0.0) for kind in ("tensor", "context", "expert"))
        each = phases.forward + phases.backward + waiting / micro_batches
        found["bubble"] = (p - 1) * each / training.interleave
    if training.replicas > 1:
        found["data"] = _data(decoder, training, links, phases)
    return found


def _data(decoder: Decoder, training: Training, links: Links, phases: Phases) -> float:
    """What backward, and under FSDP forward, does not hide."""
    d, apart, micro_batches = training.shards, training.tensor * training.pipeline, training.accumulation or 1
    layers = stage_layers(decoder, training)
    # Of experts that ranks share, each sends its own part, to fewer.
    here, _ = parameters_here(decoder, training, decoder.layers, decoder.embedding_parameters)
    here /= training.pipeline * layers
    trained = here
    if training.lora:
        trained = decoder.adapter_parameters(training.lora) / training.tensor / training.pipeline / layers
    gather = links.ring(training.compute_bytes * here, d, apart)
    again = links.ring(training.compute_bytes * here, training.reshard or d, apart)
    scatter = links.ring(training.gradient_bytes * trained, d, apart)
    if training.zero == 3:
        forward = gather + beside(phases.forward, (layers - 1) * gather)
        backward = scatter + beside(phases.backward, layers * again + (layers - 1) * scatter)
        return micro_batches * (forward + backward) + _between(training, links, trained, layers)
    if training.zero == 2:  # gradients scattered for every micro batch, weights gathered once
        return (
            micro_batches * (scatter + beside(phases.backward, (layers - 1) * scatter))
            + layers * links.ring(training.compute_bytes * trained, d, apart)
            + _between(training, links, trained, layers)
        )
    # Gradients scattered and gathered or, from where the states are, weights gathered.
    back = training.compute_bytes if training.zero and training.has_copies else training.gradient_bytes
    sent = (training.gradient_bytes + back) / 2 * trained * layers
    buckets = max(1.0, sent / max(BUCKET_BYTES, _BUCKET_BYTES_A_RANK * d))
    whole = 2 * links.ring(sent / buckets, d, apart)
    return whole + beside(phases.backward, (buckets - 1) * whole)


def _between(training: Training, links: Links, trained: float, layers: int) -> float:
    """Groups add up the gradients that their ranks share, once a step, behind those of the last micro batch."""
    apart = training.tensor * training.pipeline * training.shards
    part = training.gradient_bytes * trained * layers / training.shards
    return 2 * links.ring(part, training.replicate, apart)


def sent(decoder: Decoder, training: Training) -> dict[str, float]:
    """Bytes that a rank sends in a step of `tilewright train`, by kind, in the mean over all ranks.

    What the tables and the final norm weigh is gathered once a micro batch, since both ends of the model need it; a
    pipeline sends the stream in two parts, what the last sublayer gave and the residual.
    """
    t, p, d, micro_batches = training.tensor, training.pipeline, training.replicas, training.accumulation or 1
    context, s = training.context, training.shards
    tokens, layers = training.micro_batch * decoder.sequence // context, stage_layers(decoder, training)
    one, found = float(tokens * decoder.width * training.compute_bytes), dict[str, float]()
    ends = 2 / p  # of a model, on a stage in the mean
    mixtures = decoder.layers - decoder.dense_layers if decoder.experts > 1 else 0
    sparse = layers * mixtures / decoder.layers
    is_shared = mixtures > 0 and training.sharing > 1
    # What every rank of tensor has whole.
    places = decoder.sequence * decoder.width if decoder.positions == "learned" else 0
    routers = mixtures * decoder.router_weights
    whole = places + routers + decoder.norm_parameters
    whole += decoder.layers * (decoder.out_bias + decoder.mlp_bias) * decoder.width
    if t > 1:
        in_parts = training.sequence_parallel
        again = 0.0 if training.recompute == "none" else 1.5 if in_parts else 1.0  # but for what a block ends with
        reductions = (layers - sparse) * (4 + again) + ends
        # A mixture gathers the tokens that its ranks have shared, and their gradients.
        reductions += sparse * ((2 if in_parts else 3) + min(again, 1.0))
        found["tensor"] = micro_batches * (reductions * 2 * _ring(one, t) + ends / 2 * 3 * 2 * _ring(4.0 * tokens, t))
        # Gradients of what saw a part of the tokens on each rank.
        seen_apart = (whole if in_parts else routers) / p / (s if training.zero >= 2 else 1)
        found["tensor"] += 2 * _ring(seen_apart * training.gradient_bytes, t)
    if context > 1:
        keys = 2 * tokens * context * decoder.kv_heads_on(t) * decoder.head_dim * training.compute_bytes
        times = 2 if training.recompute == "none" else 3
        found["context"] = micro_batches * layers * times * _ring(float(keys), context)
    if is_shared:  # with selective recompute what came is kept
        ways = 3 if training.recompute == "full" else 2
        routed = _ring(decoder.active_experts * one / t, training.sharing)
        found["expert"] = micro_batches * sparse * ways * 2 * routed
    twice = decoder.head_weights if decoder.tied and p > 1 else 0  # on the first stage and on the last
    if p > 1:
        shares = t if training.sequence_parallel else 1
        found["pipeline"] = micro_batches * 4 * one / shares * (p * training.interleave - 1) / p
        held = twice / t / (s if training.zero >= 2 else 1) * training.gradient_bytes
        found["pipeline"] += ends * 2 * _ring(held, 2)
    if d > 1:
        experts = decoder.expert_parameters(decoder.layers) / t / p if is_shared else 0.0
        ends_alone = (places + (decoder.embedding_parameters - places + twice) / t) / p
        dense = (whole + (decoder.parameters - whole + twice) / t) / p - experts
        again = training.reshard or s  # ranks that have all weights when backward gathers them
        found["data"] = _replicas_sent(training, dense, ends_alone, s, again)
        if is_shared:
            shared = experts / training.expert  # of which those of a stage's last layer stay gathered
            same = s // training.expert, max(1, again // training.expert)
            found["data"] += _replicas_sent(training, shared, shared / sparse, *same)
    return found


def _replicas_sent(training: Training, here: float, ends: float, ranks: int, again: int) -> float:
    """Bytes that DDP or FSDP sends of so many parameters, of which `ends` stay gathered.

    Args:
        ranks: that have them or, by FSDP, share them.
        again: of these, the ranks that have all of them when backward gathers them.
    """
    groups, staged = training.replicate, training.pipeline > 1
    micro_batches, gathered, scattered = training.accumulation or 1, training.compute_bytes, training.gradient_bytes
    if training.zero < 2:
        return 2 * _ring(here * scattered, ranks * groups)
    # A pipeline's schedule scatters gradients once a step, and keeps weights from one backward to the next.
    times = 1 if staged else micro_batches
    gathers, more = float(times if training.zero == 3 else 1), 0.0
    if training.interleave > 1:
        gathers = piece_gathers(training.pipeline, training.interleave, micro_batches)
    elif training.zero == 3:
        more = micro_batches * (here - ends)
    within = _ring(here * (gathers * gathered + times * scattered), ranks) + _ring(more * gathered, again)
    return within + 2 * _ring(here / ranks * scattered, groups)


def piece_gathers(ranks: int, pieces: int, micro_batches: int) -> float:
    """How often interleaved 1F1B gathers the weights of a piece in a step under FSDP, in the mean over all pieces.

    It has those of the pieces that a rank computes next.

    >>> piece_gathers(4, 3, 8), piece_gathers(2, 4, 4)
    (1.0, 2.5)
    """
    if pieces <= PIECES_HELD:
        return 1.0
    steps, gathers = micro_batches * pieces, 0
    for rank in range(ranks):
        ahead = min(steps, (pieces - 1) * ranks + 2 * (ranks - 1 - rank))  # forwards before the first backward
        forward = [step // ranks % pieces for step in range(steps)]
        backward = [pieces - 1 - piece for piece in forward]
        both = [piece for pair in zip(forward[ahead:], backward, strict=False) for piece in pair]
        order, held = forward[:ahead] + both + backward[steps - ahead :], set[int]()
        for place in range(len(order)):
            following: dict[int, None] = {}
            for piece in order[place:]:
                following.setdefault(piece)
                if len(following) == PIECES_HELD:
                    break
            gathers += len(following.keys() - held)
            held = set(following)
    return gathers / (ranks * pieces)


def _ring(size: float, ranks: int) -> float:
    """Bytes that a rank sends of an all-gather or a reduce-scatter of a tensor; an all-reduce is one of each."""
    return size * (ranks - 1) / ranks
