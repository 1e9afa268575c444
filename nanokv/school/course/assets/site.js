// On every page: the theme that was chosen here before, also for a recording in a frame, and the
// key / for the search.
(() => {
  const root = document.documentElement, system = matchMedia('(prefers-color-scheme: dark)'), key = 'nanokv-theme';
  // A browser may forbid storage.
  const kept = () => { try { return localStorage.getItem(key); } catch { return null; } };
  const keep = theme => { try { localStorage.setItem(key, theme); } catch {} };
  const dark = () => root.dataset.theme ? root.dataset.theme === 'dark' : system.matches;
  // Set before anything is painted.
  if (['dark', 'light'].includes(kept())) root.dataset.theme = kept();

  addEventListener('DOMContentLoaded', () => {
    const button = document.getElementById('theme-switch');
    // recordings; '*', because a page from a file has no origin
    const frames = document.querySelectorAll('iframe');
    const tell = () => { for (const frame of frames) frame.contentWindow.postMessage({ theme: root.dataset.theme }, '*'); };
    const show = () => { button.setAttribute('aria-pressed', dark()); tell(); };
    for (const frame of frames) frame.addEventListener('load', tell);
    button.hidden = false;
    show();
    button.onclick = () => { root.dataset.theme = dark() ? 'light' : 'dark'; keep(root.dataset.theme); show(); };
    system.addEventListener('change', show);
    addEventListener('keydown', event => {
      if (event.key !== '/' || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.target.closest('input, textarea, select')) return;
      document.querySelector('header input').focus();
      event.preventDefault();
    });
  });
})();
