// The search page: every word of the question must occur in a section; a name or a heading counts
// more than its text.
const MOST = 50;                                 // results that are shown
const field = document.querySelector('header input'), list = document.getElementById('results');
const rows = INDEX.map(([url, part, page, heading, text]) => ({
  url, part, page, heading, text, lower: text.toLowerCase(), title: page.toLowerCase(),
  // both "dictcache.append" and "append"
  names: [heading.toLowerCase(), heading.toLowerCase().split('.').pop()],
}));

// Results from the course come before those from the API, unless the word looks like a name.
const share = (row, word) => (row.part === 'API' && !/[._]/.test(word) ? 0.08 : 1);
// The spellings of the pages.
const OTHERWISE = [[/(\w)-(?=\w)/g, '$1 '], [/(quanti|tokeni)s/g, '$1z'], [/positional (encoding|embedding)s?/g, 'rope']];

const weight = (row, word) => share(row, word) * points(row, word);

function points(row, word) {
  if (row.names.includes(word)) return 100;
  if (row.names.some(name => name.startsWith(word))) return 50;
  if (row.names[0].includes(word)) return 30;
  const times = row.lower.split(word).length - 1;
  return times ? Math.min(10, times) + 2 * row.title.includes(word) : row.title.includes(word);
}

function find(question) {
  const phrase = question.toLowerCase().split(/\s+/).filter(Boolean), found = [];
  if (!phrase.length) return [];
  const whole = phrase.join(' ');
  for (const row of rows) {
    const each = phrase.map(word => weight(row, word));
    if (each.some(one => !one)) continue;
    const together = phrase.length > 1 ? weight(row, whole) : 0;
    found.push([each.reduce((a, b) => a + b) / phrase.length + 2 * together, row]);
  }
  return found.sort((a, b) => b[0] - a[0]).map(([, row]) => row);
}

function spellings(question) {                   // as the pages write it, and as it was typed
  const asked = question.toLowerCase(), other = OTHERWISE.reduce((text, [from, to]) => text.replace(from, to), asked);
  return other === asked ? [asked] : [other, asked];
}

function marked(text, words) {                   // text only: nothing of a page is read as HTML
  const made = document.createDocumentFragment();
  const escaped = words.map(word => word.replace(/[.*+?^${}()|[\]\\]/g, '\\$&'));
  text.split(new RegExp(`(${escaped.join('|')})`, 'gi')).forEach((piece, i) => {
    if (i % 2) made.append(Object.assign(document.createElement('mark'), { textContent: piece }));
    else made.append(piece);
  });
  return made;
}

function shown(row, words) {
  const item = document.createElement('li'), link = document.createElement('a'), said = document.createElement('p');
  link.href = row.url;
  link.append(marked(row.heading, words));
  const hits = words.map(word => row.lower.indexOf(word)).filter(at => at >= 0);
  const at = hits.length ? Math.min(...hits) - 60 : 0, begin = at > 0 ? row.text.indexOf(' ', at) + 1 : 0;
  said.append(begin ? '… ' : '', marked(row.text.slice(begin, begin + 200), words), row.text.length > begin + 200 ? ' …' : '');
  const where = [row.heading, row.part].includes(row.page) ? row.part : `${row.part} · ${row.page}`;
  item.append(link, Object.assign(document.createElement('span'), { className: 'where', textContent: where }), said);
  return item;
}

function search() {
  const question = field.value.trim(), asked = spellings(question), found = [...new Set(asked.flatMap(find))];
  const words = asked.flatMap(text => text.split(/\s+/)).filter(Boolean);
  const many = `${found.length} result${found.length === 1 ? '' : 's'} for “${question}”`;
  const first = found.length > MOST ? `. The first ${MOST} are shown.` : '';
  if (question) document.getElementById('found').textContent = found.length ? many + first : `Nothing found for “${question}”`;
  list.replaceChildren(...found.slice(0, MOST).map(row => shown(row, words)));
}

field.value = new URLSearchParams(location.search).get('q') ?? '';
field.addEventListener('input', search);
field.form.addEventListener('submit', event => {
  event.preventDefault();
  search();
  // A page from a file cannot do this.
  try { history.replaceState(null, '', '?q=' + encodeURIComponent(field.value)); } catch {}
});
if (field.value) search(); else field.focus();
