"""The loop of an ejected program: its `main`, with the branches that one run needs."""

from __future__ import annotations

from ignite_engine.replay.eject_batches import data_of
from ignite_engine.replay.eject_plain import Plain, literal
from ignite_engine.replay.eject_rates import rate_names


def main_text(plain: Plain) -> list[str]:
    lines = ["def main():"]
    lines += [f"    {line}" for line in _set_up(plain)]
    lines += [f"    {line}" for line in _make_optimizers(plain)]
    lines += [f"    data = {data_of(plain)}"]
    batches = f"updates(data{f', {plain.collate}' if plain.collate else ''})"
    if plain.iterations is not None:
        batches = f"itertools.islice({batches}, ITERATIONS)"
    lines += [f"    for iteration, {'group' if plain.steps else 'batch'} in enumerate({batches}):"]
    lines += [f"        {line}" for line in _step(plain)]
    lines += [
        f"        if (iteration + 1) % {plain.log_every} == 0:",
        '            print(f"iteration {iteration + 1}, loss {torch.stack(logged).mean().item():.6g}", flush=True)',
        "            logged.clear()",
        "    print(weights_sha256(model))",
    ]
    return lines


def _set_up(plain: Plain) -> list[str]:
    lines = []
    if plain.matmul_precision != "highest":
        lines += [f'torch.set_float32_matmul_precision("{plain.matmul_precision}")']
    if plain.device != "cpu":
        lines += [f"torch.backends.cudnn.allow_tf32 = {plain.matmul_precision != 'highest'}"]
    if plain.threads is not None:
        lines += [f"torch.set_num_threads({plain.threads})"]
    if plain.deterministic:
        if plain.device != "cpu":
            lines += ['os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")']
        lines += ["torch.use_deterministic_algorithms(True)"]
    seed = ["seed_generators(SEED)"]
    if plain.device != "cpu":
        seed += ["torch.manual_seed(SEED)  # also that of the device"]
    if plain.model_is_made_first:
        lines += seed
    lines += [f"parts = {plain.parts}"]
    place = f'.to("{plain.device}")' if plain.device != "cpu" else ""
    lines += [f'model, loss_fn = parts["model"]{place}.train(), parts["loss_fn"]']
    seed[0] += "  # dropout does not depend on what the model has drawn"
    return lines + seed


def _make_optimizers(plain: Plain) -> list[str]:
    lines = []
    if (made := plain.own_optimizer) is not None:
        lines += [f"optimizers = list({made}.values())" if plain.has_several else f"optimizer = {made}"]
    elif plain.has_several:
        lines += ["optimizers = ["]
        lines += [f"    {optimizing.made}," for optimizing in plain.optimizers]
        lines += ["]"]
    else:
        lines += [f"optimizer = {plain.optimizers[0].made}"]
    if plain.clip_norm is not None and not plain.trains_all:
        lines += [
            "groups = [group for optimizer in optimizers for group in optimizer.param_groups]"
            if plain.has_several
            else "groups = optimizer.param_groups",
            'trained = {parameter for group in groups for parameter in group["params"]}',
            "parameters = [parameter for parameter in model.parameters() if parameter in trained]",
        ]
    functions = rate_names(plain)
    if functions:
        lines += ["scheduled = ["] if plain.has_several else []
        for number, optimizing in enumerate(plain.optimizers):
            if optimizing.rate is None:
                continue
            name, optimizer = functions[optimizing.rate], f"optimizers[{number}]"
            if plain.has_several:
                lines += [f'    *((group, group["lr"], {name}) for group in {optimizer}.param_groups),']
            else:
                lines += ['base_rates = [group["lr"] for group in optimizer.param_groups]']
        lines += ["]"] if plain.has_several else []
    if plain.scheduler_steps is not None:
        lines += [
            'schedulers = [parts["schedule"](optimizer) for optimizer in optimizers]'
            if plain.has_several
            else 'scheduler = parts["schedule"](optimizer)'
        ]
    if plain.precision == "fp16":
        options = "".join(f", {key}={literal(value)}" for key, value in plain.scaler.items())
        lines += [f'scaler = torch.amp.GradScaler("{plain.device}"{options})']
    if _counts_steps(plain):
        lines += ["steps = 0"]
    return [*lines, "logged = []"]


def _counts_steps(plain: Plain) -> bool:
    """An update may be left out, and the rates follow those that are made."""
    is_scheduled = bool(rate_names(plain)) or plain.scheduler_steps is not None
    return is_scheduled and (plain.precision == "fp16" or plain.is_weighed)


def _step(plain: Plain) -> list[str]:
    lines = []
    is_weighed, grouped = plain.is_weighed, plain.steps is not None
    if is_weighed:
        group = "group" if grouped else "[batch]"
        lines += [
            f'weights = [float(parts["weight_fn"](batch)) for batch in {group}]',
            "if not sum(weights):",
            "    continue",
        ]
    update = "steps" if _counts_steps(plain) else "iteration"
    for name in rate_names(plain).values():
        if plain.has_several:
            lines += ["for group_, base, rate_of in scheduled:", f'    group_["lr"] = base * rate_of({update})']
            break
        lines += [
            "for parameter_group, base_rate in zip(optimizer.param_groups, base_rates):",
            f'    parameter_group["lr"] = base_rate * {name}({update})',
        ]
    if is_weighed:
        lines += [f"for batch, weight in zip({group}, weights):", "    if not weight:", "        continue"]
        lines += [f"    {line}" for line in _forward_backward(plain, "weight / sum(weights)")]
    elif grouped:
        lines += ["for batch in group:"]
        lines += [f"    {line}" for line in _forward_backward(plain, "1 / len(group)")]
    else:
        lines += _forward_backward(plain, None)
    return lines + _optimize(plain)


def _forward_backward(plain: Plain, scale: str | None) -> list[str]:
    batch = "on_device(batch)" if plain.device != "cpu" else "batch"
    call, loss = f"loss_fn(model, {batch})", "loss" if plain.losses == "one" else "losses"
    forward = f"{loss}, _ = {call}" if plain.has_extras else f"{loss} = {call}"
    lines = [forward]
    if plain.precision != "fp32":
        dtype = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[plain.precision]
        lines = [f'with torch.autocast("{plain.device}", dtype={dtype}):', f"    {forward}"]
    if plain.losses != "one":
        lines += [f"loss = sum({'losses.values()' if plain.losses == 'mapping' else 'losses'})"]
    lines += ["logged.append(loss.detach())"]
    scaled = "loss" if scale is None else f"loss * ({scale})"
    if plain.precision == "fp16":
        return [*lines, f"scaler.scale({scaled}).backward()"]
    return [*lines, "loss.backward()" if scale is None else f"({scaled}).backward()"]


def _optimize(plain: Plain) -> list[str]:
    lines: list[str] = []
    if plain.precision == "fp16":
        lines += ["scaler.unscale_(optimizer)"]
    if plain.clip_norm is not None:
        parameters = "model.parameters()" if plain.trains_all else "parameters"
        lines += [f"torch.nn.utils.clip_grad_norm_({parameters}, {plain.clip_norm!r})"]
    stepped = ["steps += 1"] if _counts_steps(plain) else []
    follow = ["for scheduler in schedulers:", "    scheduler.step()"] if plain.has_several else ["scheduler.step()"]
    if plain.scheduler_steps == "step":
        stepped += follow
    if plain.precision == "fp16":
        lines += ["scale = scaler.get_scale()", "scaler.step(optimizer)", "scaler.update()", "optimizer.zero_grad()"]
        lines += ["if scaler.get_scale() >= scale:  # else the step was left out"] if stepped else []
        lines += [f"    {line}" for line in stepped]
    elif plain.has_several:
        lines += ["for optimizer in optimizers:", "    optimizer.step()", "    optimizer.zero_grad()", *stepped]
    else:
        lines += ["optimizer.step()", "optimizer.zero_grad()", *stepped]
    if plain.scheduler_steps == "epoch":
        lines += [f"if (iteration + 1) % {plain.per_epoch} == 0:  # the end of an epoch"]
        lines += [f"    {line}" for line in follow]
    return lines
