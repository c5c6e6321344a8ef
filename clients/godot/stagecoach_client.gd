# A client of Stagecoach's gateway for Godot 3.2 or newer: one file. For Godot 4 see stagecoach_client_4.gd.
#
#     var session = preload("res://stagecoach_client.gd").new("ws://127.0.0.1:7700/v1/play", token, "ship-0")
#     add_child(session)
#     session.reset(observation)
#     var action = yield(session, "acted")
#     ...                                         # the game does the action
#     session.step(reward, observation, terminated, truncated)
#
# Nothing blocks. The session keeps a journal of what the gateway has not acknowledged, in memory or in a file, and
# sends it again after a cut: nothing is learned twice, and nothing is lost with the connection or the gateway.
#
# The WebSocket is written out here. Godot's own reports neither the status of a refused handshake (401) nor, in Godot 4,
# an error that comes together with the connection's end.
extends Node

signal acted(action)  # the action for the last observation; none comes at the end of an episode
signal ended(error, message)  # the gateway refuses the session for good; or "" after a bye

const PROTOCOL = 1
const OPENING_MSEC = 10000  # limit from the attempt to the welcome
const SILENT_MSEC = 30000  # the gateway pings every 10 seconds; a connection that is silent for so long is dead

var version = -1  # policy version of the last action
var spaces = {}  # of the run

var _url
var _token
var _name
var _path
var _journal = []
var _next = 0  # number of the next message
var _awaited = -1  # number of the message whose action the game waits for
var _first  # number of this program's first message, before the first welcome; then -1
var _http: HTTPClient
var _stream: StreamPeer  # the connection, once it is a WebSocket
var _input = PoolByteArray()
var _output = PoolByteArray()
var _text = PoolByteArray()  # of a message in several frames
var _welcomed = false
var _leaving = false
var _over = false
var _heard = 0
var _again = 0
var _pause = 0.05
var _complained = false
var _random = RandomNumberGenerator.new()


# name: 1 to 64 letters, digits, '.', '_' or '-'; unique among the client's environments.
# journal: file ("user://journal.jsonl") that keeps the journal, so that a game that was killed continues its session.
func _init(url, token, name = "0", journal = ""):
	_url = url
	_token = token
	_name = name
	_path = journal
	_random.randomize()
	pause_mode = PAUSE_MODE_PROCESS
	_read_journal()
	_first = _next


# Begins an episode; `acted` gives its first action.
func reset(observation):
	_append({"type": "reset", "observation": observation}, false)


# Reports the outcome of the last action; `acted` gives the next one, unless the episode has ended.
func step(reward, observation, terminated = false, truncated = false, info = {}):
	var message = {"type": "step", "reward": reward, "observation": observation, "info": info}
	message.terminated = terminated
	message.truncated = truncated
	_append(message, terminated or truncated)


# Number of messages that the gateway has not acknowledged.
func pending():
	return _journal.size()


# Ends the session, then emits `ended`; the slot goes to another session once all of this one is learned.
func bye():
	_leaving = true
	if _welcomed:
		_again = OS.get_ticks_msec() + 2000
		_send({"type": "bye"})
	else:
		call_deferred("_end", "", "")


func _process(_delta):
	var now = OS.get_ticks_msec()
	if _over:
		return
	if _http == null:
		if now >= _again:
			_connect()
		return
	_http.poll()
	if _stream == null:
		_open()
	else:
		_receive()
	if _leaving and now > _again:
		_end("", "")
	elif _http != null and now - _heard > (SILENT_MSEC if _welcomed else OPENING_MSEC):
		_retry()


func _connect():
	var parts = _url.split("/", true, 3)  # "ws:", "", "host:port", "v1/play"
	if parts.size() != 4:
		_end("url", "expected ws://HOST:PORT/v1/play, found %s" % _url)
		return
	var secure = parts[0] == "wss:"
	var host = parts[2].split(":")
	var port = int(host[1]) if host.size() > 1 else (443 if secure else 80)
	_heard = OS.get_ticks_msec()
	_http = HTTPClient.new()
	if _http.connect_to_host(host[0], port, secure) != OK:
		_retry()


func _open():
	match _http.get_status():
		HTTPClient.STATUS_CONNECTED, HTTPClient.STATUS_BODY:
			if not _http.has_response():
				var key = PoolByteArray()
				for _i in 16:
					key.append(_random.randi() % 256)
				var headers = ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"]
				headers += ["Sec-WebSocket-Key: " + Marshalls.raw_to_base64(key), "Authorization: Bearer " + _token]
				_http.request(HTTPClient.METHOD_GET, "/" + _url.split("/", true, 3)[3], headers)
			elif _http.get_response_code() == 101:
				_stream = _http.get_connection()
				var first = null if _first == 0 else _oldest()
				_send({"type": "hello", "protocol": PROTOCOL, "session": _name, "journal_from": first})
			elif _http.get_response_code() == 401:
				_end("unauthorized", "the gateway does not know this token")
			else:
				_retry()
		HTTPClient.STATUS_RESOLVING, HTTPClient.STATUS_CONNECTING, HTTPClient.STATUS_REQUESTING:
			pass
		_:
			_retry()


func _retry():
	_drop()
	_again = OS.get_ticks_msec() + int(1000 * _pause * _random.randf_range(0.5, 1))
	_pause = min(2 * _pause, 5)
	if _pause == 5 and not _complained:
		print("the gateway is away; trying again")
	_complained = _complained or _pause == 5
	if _leaving:
		_end("", "")


func _drop():
	_http = null
	_stream = null
	_welcomed = false
	_input = PoolByteArray()
	_output = PoolByteArray()
	_text = PoolByteArray()


func _end(error, message):
	_drop()
	_over = true
	emit_signal("ended", error, message)


# Frames


func _receive():
	_transmit()
	var received = _stream.get_partial_data(16384)
	if received[0] == OK:
		_input.append_array(received[1])
	while _stream != null and _take_frame():
		_heard = OS.get_ticks_msec()
	if received[0] != OK and _stream != null:
		_retry()


# Takes a frame from the input; returns false if it is not complete yet.
func _take_frame():
	var begin = 2
	if _input.size() < begin:
		return false
	var length = _input[1] & 127
	if length > 125:
		begin += 2 if length == 126 else 8
		if _input.size() < begin:
			return false
		length = 0
		for i in range(2, begin):
			length = length << 8 | _input[i]
	var end = begin + length
	if _input.size() < end:
		return false
	var last = _input[0] & 128
	var opcode = _input[0] & 15
	var payload = _input.subarray(begin, end - 1) if length > 0 else PoolByteArray()
	_input = _input.subarray(end, _input.size() - 1) if _input.size() > end else PoolByteArray()
	match opcode:
		0, 1:
			_text.append_array(payload)
			if last:
				var parsed = JSON.parse(_text.get_string_from_utf8())
				_text = PoolByteArray()
				if parsed.error == OK and parsed.result is Dictionary:
					_handle(parsed.result)
		8:
			_put_frame(8, payload)
			if length > 1 and payload[0] << 8 | payload[1] == 1009:
				_end("too_long", "a message is longer than the gateway allows")
			else:
				_retry()
		9:
			_put_frame(10, payload)
	return true


func _put_frame(opcode, payload):
	var head = StreamPeerBuffer.new()
	head.big_endian = true
	head.put_u8(128 | opcode)
	if payload.size() < 126:
		head.put_u8(128 | payload.size())
	elif payload.size() < 65536:
		head.put_u8(128 | 126)
		head.put_u16(payload.size())
	else:
		head.put_u8(128 | 127)
		head.put_u64(payload.size())
	head.put_u32(0)  # a mask that leaves the payload as it is
	_output.append_array(head.data_array)
	_output.append_array(payload)
	_transmit()


func _transmit():
	if _output.size() == 0:
		return
	var sent = _stream.put_partial_data(_output)[1]
	_output = _output.subarray(sent, _output.size() - 1) if sent < _output.size() else PoolByteArray()


func _send(message):
	_put_frame(1, to_text(message).to_utf8())


# Messages


func _handle(message):
	match message.get("type"):
		"welcome":
			_on_welcome(message)
		"action":
			_on_action(message)
		"acknowledged":
			_forget(int(message.seq))
		"error":
			if message.error in ["away", "failed"]:
				_retry()
			else:
				_end(message.error, message.get("message", ""))
		"goodbye":
			_retry()


func _on_welcome(message):
	var next = int(message.next)
	spaces = message.get("spaces", {})
	if _first >= 0:  # the gateway may be beyond the journal's end
		var shift = int(max(0, next - _first))
		_next += shift
		if _awaited >= 0:
			_awaited += shift
		for kept in _journal:
			if kept.seq >= _first:
				kept.seq += shift
		_first = -1
		_write_journal()
	_forget(int(message.from))
	_pause = 0.05
	_welcomed = true
	for kept in _journal:
		if kept.seq >= next:
			_send(kept)


func _on_action(message):
	var kept = _find(int(message.seq))
	if kept.empty() or kept.has("version"):
		return
	version = int(message.version)
	kept.version = version
	kept.action = message.action
	if spaces.get("action", {}).get("type") == "Discrete":
		kept.action = int(message.action)
	_note({"seq": kept.seq, "action": kept.action, "version": version})
	if kept.seq == _awaited:
		_awaited = -1
		emit_signal("acted", kept.action)


func _append(message, ends):
	message = message.duplicate(true)  # the game may change its arrays
	message.seq = _next
	_awaited = -1 if ends else _next
	_next += 1
	_journal.append(message)
	if _first < 0:
		_note(message)
	if _welcomed:
		_send(message)


# The journal: a line for each message, and one for its action.


func _oldest():
	return _next if _journal.empty() else _journal[0].seq


func _find(number):
	for index in range(_journal.size() - 1, -1, -1):
		if _journal[index].seq == number:
			return _journal[index]
	return {}


func _note(line):
	if _path == "":
		return
	var file = File.new()
	var error = file.open(_path, File.READ_WRITE if file.file_exists(_path) else File.WRITE)
	if error != OK:
		push_error("cannot write the journal %s: error %d" % [_path, error])
		return
	file.seek_end()
	file.store_line(to_text(line))
	file.close()


func _forget(before):
	var forgotten = 0
	while forgotten < _journal.size() and _journal[forgotten].seq < before:
		forgotten += 1
	if forgotten > 0:
		_journal = _journal.slice(forgotten, _journal.size() - 1) if forgotten < _journal.size() else []
		_write_journal()


func _write_journal():
	if _path == "":
		return
	var file = File.new()
	var error = file.open(_path + ".part", File.WRITE)
	if error == OK:
		for message in _journal:
			file.store_line(to_text(message))
		file.close()
		error = Directory.new().rename(_path + ".part", _path)
	if error != OK:
		push_error("cannot write the journal %s: error %d" % [_path, error])


func _read_journal():
	var file = File.new()
	if _path == "" or file.open(_path, File.READ) != OK:
		return
	while not file.eof_reached():
		var parsed = JSON.parse(file.get_line())
		if parsed.error != OK or not parsed.result is Dictionary:
			break  # a line that was cut, or the end
		var line = parsed.result
		line.seq = int(line.seq)
		var kept = _find(line.seq)
		if kept.empty():
			_journal.append(line)
			_next = line.seq + 1
		else:
			for key in line:
				kept[key] = line[key]
	file.close()
	_write_journal()  # without the line that was cut


# JSON. Godot's own has six decimals for small numbers, and makes every number that it reads a float.


static func to_text(value):
	match typeof(value):
		TYPE_REAL:
			return _number(value)
		TYPE_DICTIONARY:
			var items = PoolStringArray()
			for key in value:
				items.append(JSON.print(str(key)) + ":" + to_text(value[key]))
			return "{" + items.join(",") + "}"
		TYPE_ARRAY, TYPE_REAL_ARRAY, TYPE_INT_ARRAY, TYPE_RAW_ARRAY:
			var items = PoolStringArray()
			for item in value:
				items.append(to_text(item))
			return "[" + items.join(",") + "]"
	return JSON.print(value)


static func _number(value):
	if is_nan(value) or is_inf(value):
		return "NaN"  # which the gateway refuses by name
	if value == floor(value) and abs(value) < 1e15:
		return "%d" % value
	if abs(value) < 1e-300:
		return "0"
	var exponent = floor(log(abs(value)) / log(10))
	return "%.15fe%d" % [value / pow(10, exponent), exponent]
