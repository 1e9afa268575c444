const root = document.documentElement, slides = [...document.querySelectorAll('section')];
const count = document.getElementById('count');
let at = Math.min(slides.length, Math.max(1, parseInt(location.hash.slice(1)) || 1)) - 1;
function fit(slide) {                          // smaller type where a slide holds too much
  for (let size = 100; size >= 60 && slide.scrollHeight > slide.clientHeight; size -= 5)
    slide.style.zoom = size / 100;
}
function show(i, focus = true) {
  at = Math.min(slides.length - 1, Math.max(0, i));
  slides.forEach((s, n) => s.classList.toggle('now', n === at));
  slides[at].style.zoom = ''; fit(slides[at]);
  slides[at].scrollTop = 0;
  count.textContent = `${at + 1} / ${slides.length}`;
  history.replaceState(null, '', '#' + (at + 1));
  if (focus) slides[at].focus();
}
function notes() { root.classList.toggle('notes'); show(at); }
const keys = { ArrowRight: 1, ArrowDown: 1, PageDown: 1, ' ': 1, ArrowLeft: -1, ArrowUp: -1, PageUp: -1 };
addEventListener('keydown', event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === ' ' && event.target.closest('button')) return;
  const step = keys[event.key];
  if (step) show(at + (event.shiftKey && event.key === ' ' ? -1 : step));
  else if (event.key === 'Home') show(0);
  else if (event.key === 'End') show(slides.length - 1);
  else if (event.key === 'n' || event.key === 'N') notes();
  else return;
  event.preventDefault();
});
document.getElementById('back').onclick = () => show(at - 1, false);
document.getElementById('on').onclick = () => show(at + 1, false);
document.getElementById('notes').onclick = notes;
addEventListener('hashchange', () => show((parseInt(location.hash.slice(1)) || 1) - 1));
addEventListener('resize', () => show(at, false));
root.classList.add('deck');
show(at);
