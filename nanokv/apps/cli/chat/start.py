"""A Session from the flags of `nanokv chat`, for the prompt and for the pipe."""

from dataclasses import asdict

from nanokv.apps.cli.common import beams, speculation
from nanokv.apps.cli.common.answer import template_options
from nanokv.apps.cli.common.arguments import new_seed, resolve_sampling
from nanokv.apps.cli.common.terminal import loading
from nanokv.apps.cli.common.text import refuse_special


def make_session(args, loaded, saved=None):
    """A Session as the flags say; `saved` is the header of a resumed one. Order: flag > saved > checkpoint."""
    params = asdict(resolve_sampling(args, loaded.model.generation_config))
    params |= {"max_new_tokens": args.max_new_tokens, "stop": args.stop}
    for name, value in ((saved or {}).get("settings") or {}).items():
        if name in params and getattr(args, name, None) in (None, []):
            params[name] = value
    params["seed"] = new_seed() if params["seed"] is None else params["seed"]
    system = args.system if args.system is not None else (saved or {}).get("system")
    if system:
        refuse_special(system, loaded.tokenizer, args.allow_special)
    kind = beams.generation_type(args, loaded) if args.beams else speculation.generation_type(args.speculate, loaded)
    with loading():
        from nanokv.chat.session import Session  # torch: after the banner

    return Session(
        loaded.model, loaded.tokenizer, cache=loaded.make_cache(), params=params, system=system, context=loaded.context,
        template_kwargs=template_options(args), overflow=args.overflow,
        loop_guard="off" if args.no_loop_guard else "on",
        make_generation=kind,
    )
