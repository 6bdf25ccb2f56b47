"""The training service: the Tinker API on a learner and a sampler, for programs that bring their own loop.

`wire` has the API's messages, `api` answers HTTP, `learner` executes the requests for models, `engine` computes, `states` are files, `turns`
choose whose request is next. Requests are in the log of `polyreme.experience.requests`; the sampler is `polyreme_rollout.local`.
"""
