"""From prompts to scored groups in the experience log. Imports no torch; meets the learner only in Redis."""
