"""A slot memory in plain Python and fp64: one row, one token at a time, lists for slots."""

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
        candidates = []
        previous = self.before
        for at, h in enumerate(self.segment):
            pair = np.concatenate([h, previous])
            key = w["key.weight"] @ pair
            key, value = key / np.linalg.norm(key), w["value.weight"] @ h
            surprise = ((value - self.read(key)[0]) ** 2).sum() / (value**2).sum()
            logit = w["write_gate.weight"][0] @ pair + w["write_gate.bias"][0]
            gate = _sigmoid(logit + w["surprise_weight"] * (surprise - 1))
            candidates.append((gate, at, key, value))
            previous = h
        candidates.sort(key=lambda candidate: -candidate[0])
        whole, kept, mass = sum(gate for gate, *_ in candidates), 0, 0.0
        while kept < self.shape.most_written and (kept == 0 or mass < self.shape.adaptive_mass * whole):
            mass += candidates[kept][0]
            kept += 1
        self.slots = [slot and (*slot[:3], slot[3] + 1, slot[4]) for slot in self.slots]
        order = sorted(range(len(self.slots)), key=lambda i: self.strength(self.slots[i]) if self.slots[i] else 0.0)
        self.n_replaced.append(0)
        for i, (gate, at, key, value) in zip(order, candidates[:kept], strict=False):
            if gate > (self.strength(self.slots[i]) if self.slots[i] else 0.0):
                self.n_replaced[-1] += self.slots[i] is not None
                self.slots[i] = (key, value, gate, 0, self.n - c + at)

    def forward(self, hidden):
        updates, reads = [], []
        for h in hidden:
            value, p = self.read(self.weights["query.weight"] @ h)
            gate = _sigmoid(self.weights["read_gate.weight"][0] @ h + self.weights["read_gate.bias"][0])
            updates.append(gate * (self.weights["output.weight"] @ value))
            reads.append(p)
            self.segment.append(h)
            self.n += 1
            if len(self.segment) == self.shape.segment:
                self.write()
                self.segment, self.before = [], h
        return np.array(updates), np.array(reads)
