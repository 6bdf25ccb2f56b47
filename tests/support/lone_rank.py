"""`python -m support.lone_rank`: a real learner rank without replicas."""

from polyreme_trainer.learner.__main__ import main
from support.mortal_learner import AloneLearner

if __name__ == "__main__":
    main(AloneLearner)
