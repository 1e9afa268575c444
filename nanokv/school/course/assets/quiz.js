// The questions of a page of the course: what was chosen is judged at once, and kept in this browser.
(() => {
  const key = name => `nanokv-quiz-${name}`;
  const kept = name => { try { return localStorage.getItem(key(name)); } catch { return null; } };   // a browser may forbid it
  const keep = (name, value) => { try { localStorage.setItem(key(name), value); } catch {} };

  const judge = input => {
    const right = 'right' in input.dataset, form = input.form;
    form.dataset.state = right ? 'right' : 'wrong';
    form.querySelector('[role=status]').textContent = `${right ? 'Right.' : 'Not yet.'} ${input.dataset.comment}`;
  };

  for (const input of document.querySelectorAll('.quiz input')) {
    if (kept(input.name) === input.value) { input.checked = true; judge(input); }
    input.addEventListener('change', () => { keep(input.name, input.value); judge(input); });
  }
})();
