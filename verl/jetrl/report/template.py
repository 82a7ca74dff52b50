"""The page of a report, as a Jinja2 template. It fetches nothing: style and images are inside."""

HTML = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light">
<link rel="icon" href="data:,">
<title>{{ recipe }}: Jet-RL report</title>
<style>
:root { --ink: #16191d; --soft: #4d545c; --line: #d9dde2; --panel: #f6f7f9; --accent: #0072b2; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto,
  "Helvetica Neue", Arial, sans-serif; -webkit-text-size-adjust: 100%; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 24px 64px; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 6px; overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; margin: 44px 0 12px; padding-bottom: 6px; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 0; }
p { margin: 0 0 10px; max-width: 75ch; }
.lead, figcaption, .small { color: var(--soft); }
.small { font-size: .875rem; }
a { color: var(--accent); }
code, pre { font: .875em/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; }
.swatch { display: inline-block; flex: none; width: .8em; height: .8em; border-radius: 3px; margin-right: .5em; }
.arms { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 250px), 1fr)); gap: 14px; padding: 0;
  margin: 20px 0 0; list-style: none; }
.arms > li { border: 1px solid var(--line); border-top: 4px solid; border-radius: 6px; padding: 12px 14px;
  min-width: 0; }
.arms h3 { overflow-wrap: anywhere; }
.arms p { margin: 4px 0 0; font-size: .9375rem; }
.state { font-weight: 600; }
.state::before { content: ""; display: inline-block; width: .6em; height: .6em; border-radius: 50%;
  margin-right: .45em; background: currentColor; }
.finished { color: #176639; } .running { color: #005c94; } .failed { color: #a8201a; }
.stopped, .unknown { color: #6b5200; }
progress { width: 100%; height: 6px; accent-color: var(--soft); display: block; margin: 8px 0 2px; }
pre.error { margin: 10px 0 0; padding: 10px; max-height: 16em; overflow: auto; white-space: pre-wrap;
  overflow-wrap: anywhere; background: #fdf1f0; border-left: 3px solid #a8201a; color: #5c1310; }
.notices { margin: 20px 0 0; padding: 10px 14px 10px 32px; background: #fff8e1; border-left: 4px solid #b98900; }
.notices li { max-width: 90ch; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 10px; text-align: right; vertical-align: baseline; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
thead th { border-bottom: 2px solid var(--ink); vertical-align: bottom; overflow-wrap: anywhere; }
tbody th { font-weight: 400; }
tr.group th { padding-top: 18px; font-weight: 700; border-bottom-color: #9aa2ab; }
tr.own:hover { background: var(--panel); }
.better { color: var(--soft); font-size: .8125rem; white-space: nowrap; }
.ratio { display: inline-block; min-width: 3.9em; margin-left: .5em; font-weight: 600; color: var(--accent); }
.ratio.base, td .arm { display: none; }
.plots { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 26px 30px; }
figure { margin: 0; min-width: 0; }
figure img { display: block; width: 100%; height: auto; }
figcaption { font-size: .9375rem; margin-top: 6px; }
details { margin-top: 10px; border: 1px solid var(--line); border-radius: 6px; padding: 8px 14px; }
summary { cursor: pointer; font-weight: 600; overflow-wrap: anywhere; }
details table { margin: 10px 0; font-size: .875rem; table-layout: fixed; }
details td, details th { text-align: left; overflow-wrap: anywhere; padding: 4px 8px 4px 0; }
ul.how { padding-left: 1.2em; } ul.how li { max-width: 85ch; margin-bottom: 4px; }
@media (max-width: 820px) {
  .plots { grid-template-columns: minmax(0, 1fr); }
}
@media (max-width: 700px) {
  main { padding: 18px 16px 48px; }
  h1 { font-size: 1.5rem; }
  .results, .results tbody, .results tr, .results th, .results td { display: block; }
  .results thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  .results th, .results td { border: 0; padding: 1px 0; }
  .results tr.own { border-bottom: 1px solid var(--line); padding: 8px 0; }
  .results tr.own th { font-weight: 600; }
  .results tr.group th { font-size: 1.05rem; padding-top: 22px; border-bottom: 2px solid var(--ink); }
  .results td { display: flex; align-items: baseline; font-size: .9375rem; }
  td .arm { display: inline-flex; align-items: baseline; margin-right: auto; padding-right: 8px; min-width: 0;
    text-align: left; overflow-wrap: anywhere; color: var(--soft); }
  .results .value { white-space: nowrap; text-align: right; }
  .ratio, .ratio.base { display: inline-block; min-width: 3.3em; }
}
@media print { .plots figure, tr { break-inside: avoid; } main { max-width: none; padding: 0; } }
</style>
</head>
<body>
<main>
<header>
<h1>{{ recipe }}: {{ title }}</h1>
<p class="lead">{{ subtitle }}</p>
</header>

<section aria-labelledby="arms">
<h2 id="arms">Arms</h2>
<ul class="arms">
{% for arm in arms %}
<li style="border-top-color: {{ arm.colour }}">
<h3>{{ arm.name }}</h3>
<p><span class="state {{ arm.state }}">{{ arm.state }}</span>, {{ arm.progress }}</p>
{% if arm.total_steps %}<progress max="{{ arm.total_steps }}" value="{{ arm.step }}"
aria-label="steps of {{ arm.name }}"></progress>{% endif %}
{% for line in arm.facts %}<p class="small">{{ line }}</p>{% endfor %}
{% if arm.error %}<pre class="error" tabindex="0" aria-label="error of {{ arm.name }}">{{ arm.error }}</pre>{% endif %}
</li>
{% endfor %}
</ul>
{% if notices %}
<ul class="notices" aria-label="Before you compare">
{% for notice in notices %}<li>{{ notice }}</li>{% endfor %}
</ul>
{% endif %}
</section>

<section aria-labelledby="results">
<h2 id="results">Results</h2>
{% if groups %}
<p class="small">{{ table_note }}</p>
<table class="results" role="table">
<thead role="rowgroup"><tr role="row"><th role="columnheader" scope="col">metric</th>
{% for arm in arms %}<th role="columnheader" scope="col"><span class="swatch" style="background: {{ arm.colour }}">\
</span>{{ arm.name }}</th>{% endfor %}</tr></thead>
<tbody role="rowgroup">
{% for group, rows in groups %}
<tr class="group" role="row"><th role="rowheader" scope="rowgroup" colspan="{{ arms|length + 1 }}">{{ group }}</th></tr>
{% for row in rows %}
<tr class="own" role="row"><th role="rowheader" scope="row">{{ row.label }}
{% if row.better %}<span class="better">{{ row.better }} is better</span>{% endif %}</th>
{% for cell in row.cells %}<td role="cell"><span class="arm"><span class="swatch" \
style="background: {{ cell.colour }}"></span>{{ cell.arm }}</span><span class="value">{{ cell.value }}\
{% if show_ratios %}<span class="ratio{{ " base" if cell.baseline }}">{{ cell.ratio or "" }}</span>{% endif %}\
</span></td>
{% endfor %}</tr>
{% endfor %}
{% endfor %}
</tbody>
</table>
{% else %}
<p>No step has been recorded yet.</p>
{% endif %}
</section>

{% for section, plots in sections %}
<section aria-labelledby="plots-{{ loop.index }}">
<h2 id="plots-{{ loop.index }}">{{ section }}</h2>
<div class="plots">
{% for plot in plots %}
<figure>
<img src="data:image/png;base64,{{ plot.data }}" width="{{ plot.width }}" height="{{ plot.height }}" \
alt="{{ plot.alt }}">
<figcaption>{{ plot.caption }}</figcaption>
</figure>
{% endfor %}
</div>
</section>
{% endfor %}

<section aria-labelledby="how">
<h2 id="how">How the numbers are made</h2>
<ul class="how">
{% for line in how %}<li>{{ line }}</li>{% endfor %}
</ul>
{% for block in details %}
<details>
<summary>{{ block.title }}</summary>
{% if block.rows %}
<table>
<thead><tr>{% for cell in block.head %}<th scope="col">{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in block.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table>
{% else %}<p class="small">{{ block.empty }}</p>{% endif %}
</details>
{% endfor %}
</section>
</main>
</body>
</html>
"""

MARKDOWN = """\
# {{ recipe }}: {{ title }}

{{ subtitle }}

## Arms

{% for arm in arms %}
- **{{ arm.name }}**: {{ ([arm.state, arm.progress] + arm.facts) | join(", ") }}
{% if arm.error %}

{{ arm.error | indent(6, first=True) }}

{% endif %}
{% endfor %}

{% for notice in notices %}
> {{ notice }}

{% endfor %}
## Results

{% if groups %}
{{ table_note }}

| metric | {{ arms | map(attribute="name") | join(" | ") }} |
|---|{{ "--:|" * (arms | length) }}
{% for group, rows in groups %}
{% for row in rows %}
| {{ group }}: {{ row.label | replace("|", "\\\\|") }} {% for cell in row.cells %}| {{ cell.text }} {% endfor %}|
{% endfor %}
{% endfor %}
{% else %}
No step has been recorded yet.
{% endif %}

{% for section, plots in sections %}
## {{ section }}

{% for plot in plots %}
![{{ plot.alt }}](plots/{{ plot.name }}.png)

{{ plot.caption }}

{% endfor %}
{% endfor %}
## How the numbers are made

{% for line in how %}
- {{ line }}
{% endfor %}

"""
