"""As much of a ClearML server as a task needs, on the loopback: it stores what is reported and answers from that."""

import base64
import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """Tasks by id, the scalars of each, other events, uploaded files, and every call in order."""

    def __init__(self):
        self.tasks = {}
        self.scalars = []
        self.shown = []
        self.files = []
        self.models = {}
        self.calls = []

    def answer(self, call, body):
        self.calls.append(call)
        if call == "auth.login":
            claims = {"api_version": "2.30", "server_version": "2.0.0", "exp": time.time() + 3600, "env": "open"}
            part = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
            return {"token": f"{part}.{part}.{part}"}
        if call == "projects.get_all":
            return {"projects": [{"id": "project", "name": "ignite_engine"}]}
        if call.startswith("tasks."):
            return self._task(call.removeprefix("tasks."), body)
        if call == "events.add_batch":
            for event in body:
                self._event(event)
        if call == "models.create":
            self.models[f"model{len(self.models)}"] = dict(body)
            return {"id": f"model{len(self.models) - 1}", "created": True}
        if call in ("models.edit", "models.update"):
            self.models.setdefault(body["model"], {}).update(body)
            return {"id": body["model"], "updated": 1, "fields": {}}
        if call == "models.get_by_id":
            return {"model": {"id": body["model"], **self.models.get(body["model"], {})}}
        return {"updated": 1, "fields": {}}

    def _task(self, action, body):
        name = body.get("task") if isinstance(body, dict) else None
        if action == "create":
            name = f"task{len(self.tasks)}"
            self.tasks[name] = {"id": name, "status": "created", "last_iteration": 0, **body}
            self.tasks[name] |= {
                "execution": {"parameters": {}},
                "output": {"destination": ""},
                "script": {},
                "hyperparams": {},
                "configuration": {},
            }
            return {"id": name}
        task = self.tasks.get(str(name), {})
        if action == "get_by_id":
            return {"task": task}
        if action == "get_all":
            return {"tasks": [self.tasks[each] for each in body.get("id", []) if each in self.tasks]}
        if action in ("edit", "update"):
            task |= {key: value for key, value in body.items() if key not in ("task", "force")}
        if action == "edit_hyper_params":
            for each in body["hyperparams"]:
                task["hyperparams"].setdefault(each["section"], {})[each["name"]] = each
        if action == "edit_configuration":
            task["configuration"] |= {each["name"]: each for each in body["configuration"]}
        states = {"started": "in_progress", "stopped": "stopped", "completed": "completed", "failed": "failed"}
        if action in states:
            task |= {"status": states[action], "status_reason": body.get("status_reason")}
        return {"updated": 1, "fields": {}, "started": 1}

    def _event(self, event):
        if event["type"] == "training_stats_scalar":
            self.scalars.append((event["metric"], event["variant"], event["iter"], event["value"]))
            task = self.tasks[event["task"]]
            task["last_iteration"] = max(task["last_iteration"], event["iter"])
        else:
            self.shown.append(event)


@contextmanager
def clearml_server():
    """The server, and the environment variables that lead to it."""
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if "multipart" in self.headers.get("Content-Type", ""):
                server.files.append(content)
                content = b""
            text = content.decode()
            call = self.path.rsplit("/", 1)[-1]
            lines = [json.loads(line) for line in text.splitlines() if line.strip()]
            body = lines if call.endswith("_batch") else lines[0] if lines else {}
            if call.endswith("_batch") and lines and "events" in lines[0]:
                body = lines[0]["events"]
            meta = {"id": "1", "trx": "1", "endpoint": {"name": call}, "result_code": 200, "result_subcode": 0}
            meta |= {"result_msg": "OK", "error_stack": "", "codes": [200]}
            answer = json.dumps({"meta": meta, "data": server.answer(call, body)}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{http.server_port}"
    try:
        yield (
            server,
            {
                "CLEARML_API_HOST": address,
                "CLEARML_WEB_HOST": address,
                "CLEARML_FILES_HOST": address,
                "CLEARML_API_ACCESS_KEY": "key",
                "CLEARML_API_SECRET_KEY": "secret",
            },
        )
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
