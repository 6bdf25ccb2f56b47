"""The training service: the Tinker API on a learner and a sampler, for programs that bring their own loop.

`wire` has the API's messages, `api` answers HTTP, `learner` executes models' requests, `engine` computes, `states` are files,
`turns` choose whose request is next. `polyreme.experience.requests` is their log; the sampler is `polyreme_rollout.local`.
"""
