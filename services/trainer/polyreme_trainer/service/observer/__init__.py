"""What is seen of a training service: `meters` tells what the learner did, `observer` writes each model's run directory, and
`port` serves the page and the metrics."""
