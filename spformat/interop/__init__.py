"""Files and tensors of other projects, read with full validation: nothing of theirs is trusted."""
