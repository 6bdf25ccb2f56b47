"""A program of a tenant, with the public SDK: `python -m support.tinker_client URL CASE`, with the key in TINKER_API_KEY. Its last line is JSON."""

import json
import os
import sys
from typing import Any

import httpx
import numpy as np
import openai

os.environ.update(TINKER_TELEMETRY="0", HF_HUB_OFFLINE="1")

import tinker
from tinker import types

SEQUENCES = ([5, 9, 14, 7, 30, 8], [11, 5, 9, 6])
WEIGHTS = ([0.0, 0.5, 1.0, 1.0, 1.0], [1.0, 1.0, 0.25])
STEPS = 20
ADAM = types.AdamParams(learning_rate=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.01, grad_clip_norm=1.0)


def datum(ids: list[int], weights: list[float]) -> types.Datum:
    inputs: Any = {"target_tokens": ids[1:], "weights": weights}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


DATA = [datum(ids, weights) for ids, weights in zip(SEQUENCES, WEIGHTS, strict=True)]


def train(model: Any, steps: int) -> list[float]:
    """Each optimizer step has two batches, so that gradients add up."""
    losses = []
    for step in range(steps):
        parts = [model.forward_backward([each], "cross_entropy") for each in DATA]
        moved = model.optim_step(ADAM)
        losses.append(sum(part.result().metrics["loss:sum"] for part in parts))
        moved.result()
        print(step, losses[-1], flush=True)
    return losses


def twenty_steps(service: Any) -> dict[str, Any]:
    """Trains with weights saved before and after, and compares the sampler with the learner."""
    model = service.create_lora_training_client(base_model="tiny", rank=4, seed=3)
    model = model.result()
    start = model.save_weights_for_sampler("start").result().path
    losses = train(model, STEPS)
    end = model.save_weights_for_sampler("end").result().path
    prompt = types.ModelInput.from_ints(list(SEQUENCES[0]))
    sampler = service.create_sampling_client(model_path=end)
    sampled = sampler.compute_logprobs(prompt).result()[1:]
    learned = model.forward([DATA[0]], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
    options = types.SamplingParams(max_tokens=4, temperature=1.0, seed=5, top_p=0.9)
    answers = [sampler.sample(prompt, num_samples=2, sampling_params=options).result() for _ in range(2)]
    tokens = [[list(sequence.tokens) for sequence in answer.sequences] for answer in answers]
    base = service.create_sampling_client(base_model="tiny").compute_logprobs(prompt).result()[1:]
    difference = float(np.abs(np.array(sampled) - np.array(learned)).max())
    moved = float(np.abs(np.array(base) - np.array(learned)).max())
    return {"start": start, "end": end, "losses": losses, "difference": difference, "moved": moved, "tokens": tokens}


def continued(service: Any) -> dict[str, Any]:
    """Trains, saves, and continues in a new model from the checkpoint."""
    first = service.create_lora_training_client(base_model="tiny", rank=8, seed=1).result()
    train(first, 3)
    path = first.save_state("three").result().path
    second = service.create_training_client_from_state_with_optimizer(path)
    losses = train(second, 25)
    return {"end": second.save_weights_for_sampler("end").result().path, "losses": losses}


def sampled(service: Any) -> dict[str, Any]:
    """A loop of reinforcement learning: each step samples from the newest weights, with a seed."""
    model = service.create_lora_training_client(base_model="tiny", rank=4, seed=9).result()
    prompt, tokens, losses = list(SEQUENCES[0]), [], []
    for step in range(STEPS):
        sampler = model.save_weights_and_get_sampling_client().result()
        options = types.SamplingParams(max_tokens=6, seed=step, stop=[])
        answers = sampler.sample(types.ModelInput.from_ints(prompt), num_samples=2, sampling_params=options).result().sequences
        data = [scored(prompt, answer, 1.0 if number == step % 2 else -0.5) for number, answer in enumerate(answers)]
        trained, moved = model.forward_backward(data, "importance_sampling"), model.optim_step(ADAM)
        losses.append(trained.result().metrics["loss:sum"])
        moved.result()
        tokens.append([list(answer.tokens) for answer in answers])
        print(step, losses[-1], flush=True)
    return {"end": model.save_weights_for_sampler("end").result().path, "losses": losses, "tokens": tokens}


def actor_critic(service: Any) -> dict[str, Any]:
    """A PPO loop of two models: each step samples four answers, whose reward is 2 and their share of tokens below 48, and has two epochs."""
    policy = service.create_lora_training_client(base_model="tiny", rank=4, seed=9).result()
    critic = service.create_lora_training_client(base_model="tiny:critic", rank=4, seed=9).result()
    prompt, losses = list(SEQUENCES[0]), []
    for step in range(10):
        sampler = policy.save_weights_and_get_sampling_client().result()
        options = types.SamplingParams(max_tokens=6, seed=step, stop=[])
        answers = sampler.sample(types.ModelInput.from_ints(prompt), num_samples=4, sampling_params=options).result().sequences
        given = [types.ModelInput.from_ints([*prompt, *answer.tokens][:-1]) for answer in answers]
        found = critic.forward([types.Datum(model_input=each) for each in given], "value").result().loss_fn_outputs
        acted, judged = [], []
        for answer, ids, output in zip(answers, given, found, strict=True):
            values, before = np.array(output["values"].tolist(), np.float32), len(prompt) - 1
            mask = np.array([0] * before + [1] * len(answer.tokens), np.float32)
            returns = mask * np.float32(2 + np.mean(np.array(answer.tokens) < 48))  # gamma and lambda are 1
            actions: Any = {
                "target_tokens": [*prompt, *answer.tokens][1:],
                "logprobs": [0.0] * before + list(answer.logprobs),
                "advantages": mask * (returns - values),
            }
            acted.append(types.Datum(model_input=ids, loss_fn_inputs=actions))
            judgement: Any = {"returns": returns, "values": values, "mask": mask}
            judged.append(types.Datum(model_input=ids, loss_fn_inputs=judgement))
        for _ in range(2):
            parts = [policy.forward_backward(acted, "ppo"), critic.forward_backward(judged, "value")]
            steps = [model.optim_step(ADAM) for model in (policy, critic)]
            losses.append([part.result().metrics["loss:sum"] for part in parts])
            for each in steps:
                each.result()
        print(step, losses[-1], flush=True)
    return {"end": critic.save_weights_external("end").result().path, "losses": losses}


def scored(prompt: list[int], answer: Any, advantage: float) -> types.Datum:
    """The datum of a sampled answer."""
    ids, before = [*prompt, *answer.tokens], len(prompt) - 1
    inputs: Any = {
        "target_tokens": ids[1:],
        "logprobs": [0.0] * before + list(answer.logprobs),
        "advantages": [0.0] * before + [advantage] * len(answer.tokens),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def agent(service: Any) -> dict[str, Any]:
    """Trains on what an agent with the openai client has sampled in two turns, and ends its session."""
    model = service.create_lora_training_client(base_model="tiny", rank=4, seed=9).result()
    model.forward_backward(DATA, "cross_entropy")
    model.optim_step(ADAM).result()
    weights = model.save_weights_for_sampler("now").result().path
    sessions, key = f"{sys.argv[1]}/api/v1/agent_sessions", {"x-api-key": os.environ["TINKER_API_KEY"]}
    opened = (
        httpx.post(sessions, headers=key, json={"model_path": weights, "max_tokens": 6}, timeout=60).raise_for_status().json()
    )
    chat = openai.OpenAI(base_url=opened["base_url"], api_key=opened["api_key"]).chat.completions
    messages: list[Any] = [{"role": "user", "content": "1+2"}]
    for _ in range(2):
        answer = chat.create(model="any", messages=messages).choices[0].message.content
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "again"}]
    session = f"{sessions}/{opened['agent_session_id']}"
    [told] = httpx.get(session, headers=key, timeout=60).raise_for_status().json()["trajectories"]
    assert httpx.delete(session, headers=key, timeout=60).status_code == 204
    inputs: Any = {"target_tokens": told["tokens"][1:], "logprobs": told["logprobs"][1:], "advantages": told["mask"][1:]}
    inputs["advantages"] = [float(each) for each in inputs["advantages"]]
    given = types.Datum(model_input=types.ModelInput.from_ints(told["tokens"][:-1]), loss_fn_inputs=inputs)
    trained = model.forward_backward([given], "importance_sampling").result()
    model.optim_step(ADAM).result()
    learned, mask = np.array(trained.loss_fn_outputs[0]["logprobs"].tolist()), np.array(told["mask"][1:])
    difference = float((np.abs(learned - np.array(told["logprobs"][1:])) * mask).max())
    return {"sampled": int(mask.sum()), "difference": difference, "loss": trained.metrics["loss:sum"]}


def refused(service: Any) -> dict[str, Any]:
    """What the service refuses, and that the model goes on."""
    model = service.create_lora_training_client(base_model="tiny", rank=2).result()
    problems = []
    wrong = datum([5, 10**6], [1.0])
    for data, loss in (([wrong], "cross_entropy"), (DATA, "stable_reinforce")):
        try:
            model.forward_backward(data, loss).result()
        except tinker.RequestFailedError as error:
            problems.append(str(error))
    return {"problems": problems, "losses": train(model, 1)}


def adapters(service: Any) -> dict[str, Any]:
    """Three models of different ranks, one more than the sampler has room for, are asked at the same time. Then one is saved again under its name."""
    models = [service.create_lora_training_client(base_model="tiny", rank=rank, seed=rank).result() for rank in (2, 8, 16)]
    for model, steps in zip(models, (8, 4, 6), strict=True):
        moved(model, steps)
    paths = [model.save_weights_for_sampler("saved").result().path for model in models]
    samplers = [service.create_sampling_client(model_path=path) for path in paths]
    asked = [(number, answers(samplers[number], seed)) for seed in range(3) for number in range(3)]
    plain = service.create_sampling_client(base_model="tiny")
    base = answers(plain, 0)
    measured = [(number, mismatch(models[number], answer.result())) for number, answer in asked]
    first, untrained = asked[0][1].result(), mismatch(models[0], base.result())
    moved(models[0], 8)
    service.create_rest_client().delete_checkpoint_from_tinker_path(paths[0]).result()
    assert models[0].save_weights_for_sampler("saved").result().path == paths[0]
    again = answers(service.create_sampling_client(model_path=paths[0]), 0).result()
    alone = answers(plain, 0).result().sequences
    found = {
        "base": [list(each.tokens) for each in alone] == [list(each.tokens) for each in base.result().sequences],
        "own": [value for _, value in measured],
        "others": [untrained, mismatch(models[1], asked[0][1].result()), mismatch(models[0], first)],
        "again": mismatch(models[0], again),
        "prompts": [prompt_difference(model, sampler) for model, sampler in zip(models[1:], samplers[1:], strict=True)],
    }
    service.close("success").result()
    return found


def full_parameters(service: Any) -> dict[str, Any]:
    """A model with all parameters, before and after some steps."""
    model = service.create_lora_training_client(base_model="tiny", rank=0).result()
    found = []
    for _ in range(2):
        moved(model, 3)
        sampler = model.save_weights_and_get_sampling_client().result()
        found.append(mismatch(model, answers(sampler, 0).result()))
    return {"own": found, "prompts": [prompt_difference(model, sampler)]}


def moved(model: Any, steps: int) -> None:
    """Trains in large steps."""
    for _ in range(steps):
        model.forward_backward(DATA, "cross_entropy")
        model.optim_step(types.AdamParams(learning_rate=0.02)).result()


def answers(sampler: Any, seed: int) -> Any:
    """A future of four answers of 16 tokens."""
    options = types.SamplingParams(max_tokens=16, seed=seed, stop=[])
    return sampler.sample(types.ModelInput.from_ints(list(SEQUENCES[0])), num_samples=4, sampling_params=options)


def mismatch(model: Any, answer: Any) -> float:
    """`mismatch_kl` between the learner and the sampler of an answer's tokens."""
    data, sampled_values = [], []
    for sequence in answer.sequences:
        ids = [*SEQUENCES[0], *sequence.tokens]
        data.append(datum(ids, [1.0] * (len(ids) - 1)))
        sampled_values += sequence.logprobs
    outputs = model.forward(data, "cross_entropy").result().loss_fn_outputs
    learned = [value for output in outputs for value in output["logprobs"].tolist()[len(SEQUENCES[0]) - 1 :]]
    difference = np.array(learned) - np.array(sampled_values)
    return float((np.exp(difference) - 1 - difference).mean())


def prompt_difference(model: Any, sampler: Any) -> float:
    """The largest difference between the learner's log-probabilities and a sampler's, of a prompt's tokens and of the three most likely ones at
    each place."""
    ids, options = list(SEQUENCES[0]), types.SamplingParams(max_tokens=1)
    given = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 3}
    answer = sampler.sample(types.ModelInput.from_ints(ids), num_samples=1, sampling_params=options, **given).result()
    top = answer.topk_prompt_logprobs_np
    tokens, values = np.array(top.token_ids)[1:], np.array(top.logprobs)[1:]
    columns = [(np.array(ids[1:]), answer.prompt_logprobs_np[1:]), *((tokens[:, place], values[:, place]) for place in range(3))]
    learned = []
    for targets, _ in columns:
        inputs: Any = {"target_tokens": targets.tolist(), "weights": [1.0] * len(targets)}
        asked = types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)
        learned.append(model.forward([asked], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist())
    assert (np.diff(values) <= 0).all(), "the most likely one comes first"
    return float(max(np.abs(np.array(one) - two).max() for one, (_, two) in zip(learned, columns, strict=True)))


CASES = {
    case.__name__: case for case in (twenty_steps, continued, sampled, actor_critic, agent, refused, adapters, full_parameters)
}

if __name__ == "__main__":
    outcome = CASES[sys.argv[2]](tinker.ServiceClient(base_url=sys.argv[1]))
    print(json.dumps(outcome), flush=True)
    os._exit(0)  # the SDK's threads would wait for a heartbeat
