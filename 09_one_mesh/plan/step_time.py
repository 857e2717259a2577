"""The seconds of a step, by term, and the bytes that a rank sends, by axis of the mesh.

A micro-batch takes its computation and the communication that nothing hides. The
pipeline then adds its bubble.
"""

from math import gcd
from typing import NamedTuple

from computation import FITTED, Constants, computation
from jobs import Job, Layout


class Cost(NamedTuple):
    """Seconds by term, bytes sent by a rank along each axis, and their seconds."""

    seconds: dict[str, float]
    sent: dict[str, float]
    sending: dict[str, float]

    @property
    def step(self) -> float:
        """Return the seconds of the step."""
        return sum(self.seconds.values())


class DataBytes(NamedTuple):
    """What a rank sends along the data axis, by what it can hide behind."""

    times: int  # how many forward, and backward, passes of a step send
    forward: float  # gathered in one of these forward passes
    backward: float  # gathered and reduced in one of these backward passes
    after: float  # updated weights, which exist when the step is over
    first: float  # of forward: gathered before its computation can begin
    last: float  # of backward: reduced when all computation of the step is over

    def seconds(self, rate: float, forward: float, backward: float) -> float:
        """Return the seconds that no computation of these two passes hides."""
        in_forward = max(0.0, (self.forward - self.first) / rate - forward)
        in_backward = max(0.0, self.backward / rate - backward)
        at_end = max(0.0, (self.backward - self.last) / rate - backward)
        longer = self.times * in_forward + (self.times - 1) * in_backward + at_end
        return longer + (self.times * self.first + self.last + self.after) / rate


def data_bytes(job: Job, layout: Layout) -> DataBytes:
    """Return the bytes that a rank sends along the data axis, by pass."""
    m, t, n = job.model, layout.tensor, layout.shards
    is_pipeline, is_fsdp = layout.pipeline > 1, layout.sharding == "fsdp"
    ends = m.embedding() + (0 if is_pipeline else m.head())
    part = (n - 1) / n / t
    parameters = (layout.blocks(job) * m.block() + ends) * part
    # FSDP keeps the ends in a unit of their own, which it gathers first, reduces last.
    edge = (m.block() + ends) * part
    gather, reduce = 2, 4 if layout.sharding in ("none", "fsdp") else 2
    if is_fsdp:  # a pipeline gathers and reduces once a step
        times = 1 if is_pipeline else layout.micro_batches(job)
        again = 0 if is_pipeline else parameters - ends * part  # the root stays whole
        backward = gather * again + reduce * parameters
        found = gather * parameters, backward, 0.0, gather * edge
    else:  # zero-2 keeps no whole gradient from one micro-batch to the next
        times = layout.micro_batches(job) if layout.sharding == "zero-2" else 1
        after = 0.0 if layout.sharding == "none" else gather * parameters
        found = 0.0, reduce * parameters, after, 0.0
    return DataBytes(times, *found, reduce * edge)


def ring_bytes(job: Job, layout: Layout) -> tuple[float, float]:
    """Return the bytes that a rank sends along the context axis, by pass.

    Keys and values go round in forward; they and their gradients in backward.
    """
    keys_and_values = 2 * 2 * layout.tokens(job) * job.model.kv_width / layout.tensor
    ring = layout.blocks(job) * keys_and_values * (layout.context - 1)
    return ring, ring * (2 + (layout.recompute == "full"))


def sent_by_axis(job: Job, layout: Layout) -> dict[str, float]:
    """Return the bytes that a rank sends in a step, by axis.

    Tensor: two all-gathers and two reduce-scatters a block and pass, or the all-reduces
    that equal them. Context: keys and values go round. Pipeline: activations and back.
    """
    t, steps, blocks = layout.tensor, layout.micro_batches(job), layout.blocks(job)
    passes = {"none": 2.0, "selective": 2.5, "full": 3.0}[layout.recompute]
    message = 2 * layout.tokens(job) * job.model.width
    gathered = 0.75 if job.fp8 else 1.0  # what is gathered, one half, is in fp8 too
    crossings = layout.interleaved if layout.pipeline > 1 else 0
    data = data_bytes(job, layout)
    return {
        "tensor": steps * blocks * passes * 4 * message * gathered * (t - 1) / t,
        "context": steps * sum(ring_bytes(job, layout)),
        "pipeline": 2 * steps * message / t * crossings,
        "data": data.times * (data.forward + data.backward) + data.after,
    }


def rates(job: Job, layout: Layout, constants: Constants) -> dict[str, float]:
    """Return the bytes a second of a rank along each axis.

    A group inside a host has the host's links. A ring through several hosts leaves each
    once, over the network links of all its ranks there.
    """
    cluster, t, c = job.cluster, layout.tensor, layout.context
    spans = {"tensor": t, "context": t * c, "data": t * layout.shards}
    rate = {}
    for axis, span in spans.items():
        # Groups that do not fill hosts evenly have this few of their ranks in one.
        in_host = gcd(span, cluster.per_host)
        across = min(cluster.inside, max(1, in_host // t) * cluster.between)
        is_inside = in_host == span or layout.devices <= cluster.per_host
        rate[axis] = cluster.inside if is_inside else across
    is_inside = layout.devices <= cluster.per_host
    rate["pipeline"] = cluster.inside if is_inside else cluster.between
    return {axis: constants.links * each for axis, each in rate.items()}


def step_cost(job: Job, layout: Layout, constants: Constants = FITTED) -> Cost:
    """Return what a step costs, with what is hidden left out of its seconds."""
    m = layout.micro_batches(job)
    passes = computation(job, layout, constants)  # forward, backward
    sent, rate = sent_by_axis(job, layout), rates(job, layout, constants)
    sending = {axis: sent[axis] / rate[axis] for axis in sent}
    seconds = {term: m * sum(one[term] for one in passes) for term in passes[0]}
    behind = seconds["products"] if job.async_tensor else 0.0
    seconds["tensor"] = max(0.0, sending["tensor"] - behind)
    # The next keys and values travel while attention reads these.
    rings = zip(ring_bytes(job, layout), passes, strict=True)
    late = [ring / rate["context"] - one["attention"] for ring, one in rings]
    seconds["context"] = m * sum(max(0.0, each) for each in late)
    seconds["pipeline"] = sending["pipeline"]
    working = sum(seconds.values())
    seconds["bubble"] = (layout.pipeline - 1) / (layout.interleaved * m) * working
    seconds["data"] = sending["data"]
    if job.overlap:
        forward, backward = (sum(one.values()) for one in passes)
        data = data_bytes(job, layout)
        seconds["data"] = data.seconds(rate["data"], forward, backward)
    n = layout.shards if layout.sharding != "none" else 1
    parameters = job.model.parameters() / layout.pipeline / layout.tensor / n
    seconds["optimizer"] = 30 * parameters / job.cluster.hbm  # reads 16, writes 14
    return Cost(seconds, sent, sending)
