"""Standard forms of Mixture-of-Experts layers -> ``ascend.moe``."""
