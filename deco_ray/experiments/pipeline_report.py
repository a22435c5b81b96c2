from pathlib import Path


def build_pipeline_report(config, site, runs, sites, frame, table, notes, name):
    folder = site.store.root / "reports" / name
    folder.mkdir(parents=True, exist_ok=True)
    p = folder / "report.html"
    p.write_text(table.plain())
    return p, False
