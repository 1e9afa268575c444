// The entry point of the page.

function dress(theme) {
  wear(theme);
  remember("theme", theme);
  cache.redraw();
}

function start() {
  cache.build();
  chat.build();
  $("key-form").addEventListener("submit", useKey);
  $("theme").value = recall("theme", "system");
  $("theme").addEventListener("change", () => dress($("theme").value));
  dress($("theme").value);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", () => cache.redraw());
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) live.stream?.abort();
  });
  $("text").focus();
  live.run();
}

start();
