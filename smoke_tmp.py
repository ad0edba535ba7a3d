import os, tempfile, pathlib, logging, time
os.environ["AQG_STATE_DIR"]=tempfile.mkdtemp()
logging.disable(logging.CRITICAL)
t=time.time()
from tests.flower.test_apps import *
from tests.flower.test_same_model import make_session, clients, play
for recipe, downlink in (("auto","condensed"),("lean","exact")):
    answers=clients()
    a=play(make_session(recipe,downlink), lambda c,o: answers[c](o))
    p=pathlib.Path(tempfile.mkdtemp())
    f=local_federation(p, recipe=recipe, downlink=downlink, round_timeout=60.0)
    b=f.run()
    print(recipe, downlink, np.array_equal(a,b), [r.get("incidents") for r in f.rows() if r.get("incidents")], f.agree(), time.time()-t, flush=True)
