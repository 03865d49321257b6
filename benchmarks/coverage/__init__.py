"""Which architectures of Transformers train under `remat.enable`, and with which gradients."""
