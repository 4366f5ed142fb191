"""Layer rules: how each function's per-example parameter gradients follow from what it read and the gradient of what it returned.

    | file          | functions                                        | layers |
    |---------------|--------------------------------------------------|--------------------------------------------------------------------|
    | linear.py     | linear, addmm, matmul, mm                        | Linear, LoRA, transformers' Conv1D, any x @ W or x @ W.T |
    | conv.py       | conv1d, conv2d, conv3d                           | Conv1d/2d/3d, any stride, padding, dilation, groups |
    | embedding.py  | embedding                                        | Embedding with padding_idx |
    | norm.py       | layer_norm, rms_norm, group_norm, batch_norm, …  | LayerNorm, RMSNorm, GroupNorm, InstanceNorm, frozen BatchNorm |
    | attention.py  | multi_head_attention_forward                     | MultiheadAttention with its packed projection |
    | broadcast.py  | add, sub, mul, div, …; expand, repeat            | raw parameters: position embeddings, class tokens, LayerScale |
    | derived.py    | anything that reads parameters alone             | views and parametrisations (weight.t(), weight normalisation) |
    | fallback.py   | every other function                             | one copy of the parameter an example, through vmap or a loop |

A rule matches a function, not a module's type, so a layer is served however it is written, and no use of a parameter is missed.
"""

from fiberdp.engines.layers.plan import plan_sites

__all__ = ["plan_sites"]
