"""A slot memory in plain Python and fp64: one row, one token at a time, lists for slots; and its metrics, counted."""

import math
import statistics

import numpy as np


def _softmax(logits):
    powers = np.exp(np.array(logits) - max(logits))
    return powers / powers.sum()


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


class SlotOracle:
    """What a SlotMemory should do: `forward(hidden)` of one row's real tokens gives the updates and each read's p."""

    def __init__(self, memory):
        self.shape = memory.shape
        self.weights = {name: value.detach().double().numpy() for name, value in memory.state_dict().items()}
        self.slots = [None] * self.shape.slots  # each (key, value, strength, age, position)
        self.segment, self.before, self.n = [], np.zeros(self.shape.hidden_size), 0
        self.n_replaced = []
        self.open_reads, self.segments = [], []  # p of each token of the open segment; what was decided of each before

    def strength(self, slot):
        return slot[2] * self.shape.decay ** slot[3]

    def read(self, query):
        w = self.weights
        query = query / np.linalg.norm(query)
        full = [i for i, slot in enumerate(self.slots) if slot is not None]
        sharpness = np.exp(w["log_sharpness"])
        logits = [sharpness * query @ self.slots[i][0] + np.log(self.strength(self.slots[i])) for i in full]
        p = _softmax([float(w["null_logit"]), *logits])
        whole = np.zeros(1 + len(self.slots))
        whole[0] = p[0]
        value = np.zeros(self.shape.memory_dim)
        for i, share in zip(full, p[1:], strict=True):
            whole[1 + i] = share
            value = value + share * self.slots[i][1]
        return value, whole

    def write(self):
        w, c = self.weights, self.shape.segment
        candidates, surprises = [], []
        previous = self.before
        for at, h in enumerate(self.segment):
            pair = np.concatenate([h, previous])
            key = w["key.weight"] @ pair
            key, value = key / np.linalg.norm(key), w["value.weight"] @ h
            surprise = ((value - self.read(key)[0]) ** 2).sum() / (value**2).sum()
            logit = w["write_gate.weight"][0] @ pair + w["write_gate.bias"][0]
            gate = _sigmoid(logit + w["surprise_weight"] * (surprise - 1))
            candidates.append((gate, at, key, value))
            surprises.append(surprise)
            previous = h
        candidates.sort(key=lambda candidate: -candidate[0])
        whole, kept, mass = sum(gate for gate, *_ in candidates), 0, 0.0
        while kept < self.shape.most_written and (kept == 0 or mass < self.shape.adaptive_mass * whole):
            mass += candidates[kept][0]
            kept += 1
        self.slots = [slot and (*slot[:3], slot[3] + 1, slot[4]) for slot in self.slots]
        order = sorted(range(len(self.slots)), key=lambda i: self.strength(self.slots[i]) if self.slots[i] else 0.0)
        self.n_replaced.append(0)
        written, ages = [], []
        for i, (gate, at, key, value) in zip(order, candidates[:kept], strict=False):
            if gate > (self.strength(self.slots[i]) if self.slots[i] else 0.0):
                self.n_replaced[-1] += self.slots[i] is not None
                ages += [] if self.slots[i] is None else [self.slots[i][3]]
                written.append(at)
                self.slots[i] = (key, value, gate, 0, self.n - c + at)
        gates = {at: gate for gate, at, *_ in candidates}
        self.segments.append({
            "reads": self.open_reads, "kept": kept, "mass_kept": mass / whole, "surprises": surprises, "ages": ages,
            "written": [gates.pop(at) for at in written], "rejected": list(gates.values()),
        })  # fmt: skip
        self.open_reads = []

    def forward(self, hidden):
        updates, reads = [], []
        for h in hidden:
            value, p = self.read(self.weights["query.weight"] @ h)
            gate = _sigmoid(self.weights["read_gate.weight"][0] @ h + self.weights["read_gate.bias"][0])
            updates.append(gate * (self.weights["output.weight"] @ value))
            reads.append(p)
            self.open_reads.append(p)
            self.segment.append(h)
            self.n += 1
            if len(self.segment) == self.shape.segment:
                self.write()
                self.segment, self.before = [], h
        return np.array(updates), np.array(reads)

    def metrics(self):
        """Every metric of the page, of the newest 8 segments and the open one; NaN where there is nothing to count."""
        newest, c = self.segments[-8:], self.shape.segment
        reads = [p for segment in newest for p in segment["reads"]] + self.open_reads
        mass = [sum(p[1 + i] for p in reads) for i in range(len(self.slots))]
        shares = [m / sum(mass) for m in mass]
        asked = [[q / sum(p[1:]) for q in p[1:]] for p in reads if sum(p[1:]) > 0]
        full = [i for i, slot in enumerate(self.slots) if slot is not None]
        used = [i for i, share in enumerate(shares) if share > 1 / (10 * len(shares))]
        strengths = [self.strength(self.slots[i]) for i in full]
        keys = np.array([self.slots[i][0] for i in full])
        values = np.linalg.eigvalsh(keys @ keys.T)
        spectrum = [value / values.sum() for value in values if value > 0]
        read_entropy, marginal = statistics.fmean(map(_entropy, asked)), _entropy(shares)
        each = {name: [segment[name] for segment in newest] for name in newest[0]}
        return {
            "occupied": len(full) / len(self.slots),
            "utilization": len(used) / len(self.slots),
            "dead": len(set(full) - set(used)) / len(full),
            "null_share": statistics.fmean(p[0] for p in reads),
            "read_entropy": read_entropy,
            "marginal_entropy": marginal,
            "mutual_information": marginal - read_entropy,
            "effective_slots": math.exp(marginal),
            "strength_mean": statistics.fmean(strengths),
            "strength_p5": _quantile(strengths, 0.05),
            "strength_p95": _quantile(strengths, 0.95),
            "gate_written": _mean([statistics.fmean(gates) for gates in each["written"] if gates]),
            "gate_rejected": _mean([statistics.fmean(gates) for gates in each["rejected"] if gates]),
            "write_rate": statistics.fmean(len(gates) / c for gates in each["written"]),
            "replaced": statistics.fmean(len(ages) for ages in each["ages"]),
            "age_at_eviction": _median([statistics.median_low(ages) for ages in each["ages"] if ages]),
            "age_read": sum(share * self.slots[i][3] for i, share in enumerate(shares) if i in full),
            "compression": statistics.fmean(kept / c for kept in each["kept"]),
            "gate_mass_kept": statistics.fmean(each["mass_kept"]),
            "redundancy": max(float(a @ b) for i, a in enumerate(keys) for b in keys[:i]),
            "effective_rank": math.exp(_entropy(spectrum)),
            "surprise": statistics.fmean(map(statistics.fmean, each["surprises"])),
            "surprise_p95": statistics.fmean(_quantile(values, 0.95) for values in each["surprises"]),
            "surprise_over_one": statistics.fmean(x > 1 for values in each["surprises"] for x in values),
        }, shares


def _entropy(shares):
    return -sum(share * math.log(share) for share in shares if share > 0)


def _quantile(values, q):
    """Between the two nearest of the ordered values, linearly."""
    at, ordered = q * (len(values) - 1), sorted(values)
    low = int(at)
    return ordered[low] + (at - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def _mean(values):
    return statistics.fmean(values) if values else math.nan


def _median(values):
    return statistics.median(values) if values else math.nan
