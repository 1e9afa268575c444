"""Speculative decoding: draft, verify in one forward, accept while equal, roll the cache back."""

from nanokv.school.course.drawings.canvas import Canvas, Drawing

ALT = (
    "Four rows. Draft: after the token fox, something cheap guesses asked, the, old, owl. Verify: "
    "the model is fed fox and the four guesses in one forward, and gives its own choice after "
    "each: asked, the, owl, owl, said. Accept: the first two guesses agree and are kept, the third "
    "differs, so the model's own choice owl is taken and the rest is dropped. Roll back: the cache "
    "grew from n to n + 5 tokens and is truncated to n + 3: fox, asked, the."
)
GUESSES = ("asked", "the", "old", "owl")
CHOICES = ("asked", "the", "owl", "owl", "said")
KEPT = 2
WIDE = 72
PITCH = 76


def speculation(alt: str = ALT) -> Drawing:
    """One round with four guesses, of which two are kept."""
    canvas = Canvas("guesses", "Guess, verify, accept, roll back", 466)
    places = [12 + PITCH * i for i in range(5)]
    canvas.text(12, 56, "1 Draft: something cheap guesses four tokens", bold=True)
    for i, x in enumerate(places):
        canvas.box(x, 66, WIDE, 32, ("fox", *GUESSES)[i], "plain", dashed=i > 0)
    canvas.text(12, 132, "2 Verify: one forward over all five", bold=True)
    canvas.text(12, 150, "The model's own choice after each of them:", 12)
    for i, x in enumerate(places):
        canvas.arrow((x + WIDE / 2, 160), (x + WIDE / 2, 182))
        canvas.box(x, 182, WIDE, 32, CHOICES[i], "work")
    canvas.text(12, 248, "3 Accept: equal guesses, then its own choice", bold=True)
    for x, guess in zip(places[:KEPT], GUESSES[:KEPT], strict=True):
        canvas.box(x, 258, WIDE, 32, f"✓ {guess}", "new")
    for x, guess in zip(places[KEPT:4], GUESSES[KEPT:], strict=True):
        canvas.box(x, 258, WIDE, 32, f"✗ {guess}", "wrong")
    canvas.text(
        12, 312, f"Taken: {GUESSES[0]}, {GUESSES[1]}, and the model's own {CHOICES[KEPT]}.", 12
    )
    canvas.text(12, 350, "4 Roll back: wrong guesses leave the cache", bold=True)
    for i, x in enumerate(places):
        words = ("fox", *GUESSES)[i]
        canvas.box(x, 360, WIDE, 32, words, "cached" if i <= KEPT else "plain", dashed=i > KEPT)
    edge = places[KEPT + 1] - 2
    canvas.arrow((390, 404), (edge, 404))
    canvas.text(edge, 424, f"truncate from n + 5 to n + {KEPT + 1} tokens", 12, "middle")
    canvas.legend(454, ("new", "kept"), ("wrong", "dropped"), ("cached", "in the cache"))
    return canvas.drawing(alt)
