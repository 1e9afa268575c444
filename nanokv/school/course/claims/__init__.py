"""The claims of five articles and two papers, each with the truth and a notebook that shows it.

Claim N.k is the k-th statement of article N; the papers have the numbers after the articles. If
the truth is a number, `value` computes it with nanokv; tests/school/test_claims.py asserts it, and
notebook `where` measures it. `nanokv course claims` prints all claims.
"""

from nanokv.school.course.claims.claim import Article, Claim

ARTICLES = {
    0: Article(
        "J. Wu, How the KV Cache Works in HuggingFace Transformers",
        "https://jifengwu2k.github.io/2026/05/31/"
        "How-the-KV-Cache-Works-in-HuggingFace-Transformers/",
    ),
    1: Article("K. Kanojiya, KV Cache Explained"),
    2: Article(
        "A. Roy Gosthipaty and others, KV Cache from scratch in nanoVLM",
        "https://huggingface.co/blog/kv-cache",
    ),
    3: Article(
        "F. Cariaggi, The uncompromising intro to KV caching",
        "https://anferico.github.io/2026-01-07-kv-caching/",
    ),
    4: Article("Course note 10, KV cache: reuse old keys, skip old work"),
}
PAPERS = {
    5: Article("Zandieh and others, TurboQuant", "https://arxiv.org/abs/2504.19874"),
    6: Article("Liu and others, KIVI", "https://arxiv.org/abs/2402.02750"),
}
SOURCES = ARTICLES | PAPERS
VERDICTS = ("right", "misleading", "wrong")


def _all() -> dict[str, Claim]:
    from nanokv.school.course.claims import (
        article0,
        article1,
        article2,
        article3,
        article4,
        paper5,
        paper6,
    )

    modules = (article0, article1, article2, article3, article4, paper5, paper6)
    return {record.id: record for module in modules for record in module.CLAIMS}


def table() -> str:
    """Every claim in three lines, by article or paper."""
    lines = []
    for number, article in SOURCES.items():
        kind = "article" if number in ARTICLES else "paper"
        lines += ["", f"{kind} {number}: {article.title}"]
        if article.address:
            lines.append(f"  {article.address}")
        for claim in (c for c in _all().values() if c.id.startswith(f"{number}.")):
            lines += [f"  {claim.id:<5} {claim.verdict:<11} {claim.says}", f"        {claim.truth}"]
            lines.append(f"        {numbers(claim)}notebook {claim.where}")
    counts = ", ".join(f"{sum(c.verdict == v for c in _all().values())} {v}" for v in VERDICTS)
    return "\n".join([*lines[1:], "", f"{len(_all())} claims: {counts}"]) + "\n"


def page() -> str:
    """All claims in Markdown, a table per article: the text of notebooks/claims.md.

    `nanokv course build` writes that file.
    """
    lines = [
        "# What the articles say, and what is true",
        "",
        "A notebook executes each claim. Claim 2.7 is the seventh of article 2. The articles are "
        "in",
        "the order of their numbers, from 0 on. Behind them are two papers, by their abstracts.",
    ]
    for number, article in SOURCES.items():
        lines += [
            "",
            f"## {article.title}",
            "",
            article.where,
            "",
            "| No. | It says | Verdict | True is | Numbers |",
            "|---|---|---|---|---|",
        ]
        for claim in (c for c in _all().values() if c.id.startswith(f"{number}.")):
            lines.append(
                f"| {claim.id} | {claim.says} | {claim.verdict} | {claim.truth} | "
                f"{numbers(claim)}notebook {claim.where} |"
            )
    return "\n".join(lines) + "\n"


def numbers(claim: Claim) -> str:
    """A text such as "printed 64, computed 128 values per head · "; "" without a number.

    "implied" replaces "printed" where the number only follows from the article.
    """
    if claim.value is None:
        return ""
    computed = f"computed {claim.value():,.12g} {claim.unit}".rstrip() + " · "
    if claim.printed is None:
        return computed
    source = "implied" if claim.implied else "printed"
    return f"{source} {claim.printed:,.12g}, {computed}"


def __getattr__(name: str):
    if name != "CLAIMS":
        raise AttributeError(name)
    globals()["CLAIMS"] = _all()
    return globals()["CLAIMS"]
