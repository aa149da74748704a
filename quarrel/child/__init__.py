"""Child processes: how they are started, what travels between, and how the parent knows that they make progress."""
