"""What the tests of channels share: one way to run them, and a masked reference in other words."""

import torch
from tiny import random_ids
from torch.nn.functional import linear

from pop_core.channels import OnlineChannels, column_norms
from pop_core.plan import ALL, PrefillCut

IDS, TOKENS = random_ids(14, seed=7), random_ids(6, seed=8)
CUT = PrefillCut(3, sinks=2, boundary=3)


def run(subject, pruning, ids=IDS, tokens=TOKENS, pad=None, cut=None):
    """Logits of the read and of each teacher-forced step, `[B, 1 + T, vocab]`, and the channels."""
    norms = column_norms(subject.decoder, pruning.score)
    channels = OnlineChannels(subject.decoder, pruning, norms, len(ids))
    state = subject.read(ids, cut, pad, reading=channels.reading)
    channels.partition()
    return subject.write(state, tokens, channels.writing), channels


class Masked:
    """The reference: nothing is sliced, and a token's activations are multiplied by a mask."""

    def __init__(self, subject, pruning):
        self.decoder, self.pruning, self.hidden = subject.decoder, pruning, {}

    def weights(self, i):
        """(weight, bias) of gate, up and down of each FFN of a layer."""
        mlp = self.decoder.layers[i].mlp
        if not hasattr(mlp, "experts"):
            return [[(part.weight, part.bias) for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]]
        fused = zip(mlp.experts.gate_up_proj, mlp.experts.down_proj, strict=True)
        found = [[(weight, None) for weight in (*both.chunk(2), down)] for both, down in fused]
        if hasattr(mlp, "shared_expert"):
            part = mlp.shared_expert
            found.append([(module.weight, None) for module in (part.gate_proj, part.up_proj, part.down_proj)])
        return found

    def layer(self, i, x, one):
        """The FFN of a layer for `[1, T, hidden]`; one: (which FFN, its `W_down`, activations) -> activations."""
        mlp, states = self.decoder.layers[i].mlp, x[0]
        act = getattr(mlp, "act_fn", None) or mlp.experts.act_fn
        rows = []
        for state in states:

            def ffn(e, state=state):
                gate, up, down = self.weights(i)[e]
                return linear(one(e, down[0], act(linear(state, *gate)) * linear(state, *up)), *down)

            if not hasattr(mlp, "experts"):
                rows.append(ffn(0))
                continue
            shares = linear(state, mlp.gate.weight).softmax(-1)
            best, which = shares.topk(mlp.gate.top_k)
            best = best / best.sum() if mlp.gate.norm_topk_prob else best
            row = sum(weight * ffn(e) for weight, e in zip(best, which.tolist(), strict=True))
            if hasattr(mlp, "shared_expert"):
                row = row + mlp.shared_expert_gate(state).sigmoid() * ffn(len(mlp.experts.down_proj))
            rows.append(row)
        return torch.stack(rows)[None]

    def reading(self, counted):
        def ffn(i, x):
            def keep(e, down, h):
                self.hidden.setdefault((i, e), []).append(h)
                return h

            return self.layer(i, x, keep)

        return ffn

    def writing(self, i, x):
        return self.layer(i, x, lambda e, down, h: h * self.mask(i, e, down, h))

    def mask(self, i, e, down, h):
        channels, norms = len(h), down.abs().sum(0)
        budget = self.pruning.budget(channels)
        mask = torch.zeros(channels)
        if self.pruning.rescore == ALL:
            mask[(norms * h.abs()).topk(budget.kept).indices] = 1
            return mask
        if (i, e) not in self.hidden:
            return torch.ones(channels)
        order = (norms * torch.stack(self.hidden[i, e]).norm(dim=0)).argsort(descending=True)
        mask[order[: budget.retained]] = 1
        band = order[budget.retained : budget.retained + budget.candidates]
        mask[band[(norms * h.abs())[band].topk(budget.chosen).indices]] = 1
        return mask
