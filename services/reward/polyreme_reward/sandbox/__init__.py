"""Programs that nobody trusts: `modes` finds what isolates them here, `run` starts and watches one, `inside` is what runs in there."""
