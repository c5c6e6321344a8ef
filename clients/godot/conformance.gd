# Plays the corridor of `stagecoach gateway conformance` through stagecoach_client.gd:
#     stagecoach gateway conformance -- godot3-server -s clients/godot/conformance.gd
extends SceneTree

const Client = preload("stagecoach_client.gd")

var session


func _initialize():
	OS.low_processor_usage_mode_sleep_usec = 500
	var url = OS.get_environment("STAGECOACH_URL")
	var token = OS.get_environment("STAGECOACH_TOKEN")
	session = Client.new(url, token, OS.get_environment("STAGECOACH_SESSION"), OS.get_environment("STAGECOACH_JOURNAL"))
	session.connect("ended", self, "_on_ended")
	root.add_child(session)
	play(int(OS.get_environment("STAGECOACH_EPISODES")))


func play(episodes):
	for episode in episodes:
		var position = 0
		var steps = 0
		var terminated = false
		var truncated = false
		session.reset([position, steps])
		while not (terminated or truncated):
			var action = yield(session, "acted")
			position = int(max(0, position + (1 if action == 1 else -1)))
			steps += 1
			terminated = position == 5
			truncated = steps == 20 and not terminated
			var info = {"steps": steps} if terminated or truncated else {}
			session.step(0.5 * position, [position, steps], terminated, truncated, info)
	var until = OS.get_ticks_msec() + 60000
	while session.pending() > 0 and OS.get_ticks_msec() < until:
		yield(self, "idle_frame")
	session.bye()


func _on_ended(error, _message):
	if error != "":
		printerr(error)
	quit(2 if error != "" else 0)
