"""A Session from the flags of `nanokv chat`, for the prompt and for the pipe."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from nanokv.apps.cli.chat.options import ChatOptions
from nanokv.apps.cli.common import beams, speculation
from nanokv.apps.cli.common.options import new_seed
from nanokv.apps.cli.common.plan import Loaded
from nanokv.apps.cli.common.terminal import loading
from nanokv.apps.cli.common.text import refuse_special

if TYPE_CHECKING:
    from nanokv.chat.session import Session


def make_session(given: ChatOptions, loaded: Loaded, saved: dict | None = None) -> "Session":
    """A Session with the flags' settings. `saved`: the header of a resumed session.

    A flag comes before the saved value, and that before the checkpoint's default.
    """
    sampling = given.sampling
    template = given.template
    saved = saved or {}
    flags = asdict(sampling) | {"stop": list(sampling.stop)}
    params = asdict(sampling.resolve(loaded.model.generation_config))
    params |= {"max_new_tokens": sampling.max_new_tokens, "stop": list(sampling.stop)}
    for name, value in (saved.get("settings") or {}).items():
        if name in params and flags[name] in (None, []):
            params[name] = value
    if params["seed"] is None:
        params["seed"] = new_seed()
    system = template.system
    if system is None:
        system = saved.get("system")
    if system:
        refuse_special(system, loaded.tokenizer, template.allow_special)
    if sampling.beams:
        kind = beams.generation_type(sampling.beams, loaded)
    else:
        kind = speculation.generation_type(given.speed.speculate, loaded)
        speculation.announce_end(given.speed.speculate, loaded, given.output)
    with loading():
        from nanokv.chat.session import Session  # imports torch, so only after the banner

    return Session(
        loaded.model,
        loaded.tokenizer,
        cache=loaded.make_cache(),
        params=params,
        system=system,
        context=loaded.context,
        template_kwargs=template.values(),
        overflow=given.overflow,
        loop_guard="off" if given.no_loop_guard else "on",
        make_generation=kind,
    )
