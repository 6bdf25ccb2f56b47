"""What is seen of a training service: `report` and `meters` tell what the learner did, `observer` writes each model's run
directory, `port` serves the page and the metrics.
"""
