// A drawing that moves: its steps appear one after the other when it is first seen, and one at a
// time by its button.
(() => {
  const PACE = 1500; // ms per step
  const host = document.currentScript.parentElement, image = host.querySelector("img");
  const [next, again] = host.querySelectorAll("button"), { name, steps } = host.dataset, last = Number(steps);
  const whole = image.src, bytes = Uint8Array.from(atob(whole.split(",")[1]), (c) => c.charCodeAt(0));
  const svg = new TextDecoder().decode(bytes);
  let at = last, timer = null;

  function show(n) { // the picture after step n; what later steps add is hidden
    at = n;
    const later = Array.from({ length: last - n }, (_, i) => `.${name}-${n + 1 + i}{visibility:hidden}`).join("");
    const frame = svg.replace("</svg>", `<style>${later}</style></svg>`);
    image.src = later ? `data:image/svg+xml,${encodeURIComponent(frame)}` : whole;
    host.dataset.at = n;
  }

  function stop() { clearInterval(timer), timer = null; }

  function play() {
    stop();
    show(0);
    timer = setInterval(() => (at < last ? show(at + 1) : stop()), PACE);
  }

  next.addEventListener("click", () => { stop(); show(at < last ? at + 1 : 0); });
  again.addEventListener("click", play);
  addEventListener("beforeprint", () => { stop(); show(last); });
  host.querySelector("p").hidden = false;
  show(last);
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  const seen = new IntersectionObserver(([entry]) => {
    if (!entry.isIntersecting) return;
    seen.disconnect();
    play();
  }, { threshold: 0.6 });
  seen.observe(image);
})();
