"""Pictures from strangers, as the patches that a tower encodes."""
