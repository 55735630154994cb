-- Gives what changed after a sequence, as it is now, and where the history stands: all of one moment. It ends with the commit
-- that reaches the limit or the budget of bytes, or before a gap in the log.
local P, after, limit, budget = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local call = redis.call
local upto, rows, seen, bytes = after, {}, {}, 0
for _, entry in ipairs(call('XRANGE', P .. 'log', '(' .. after .. '-0', '+', 'COUNT', limit)) do
  local seq = string.match(entry[1], '^%d+')
  if tonumber(seq) ~= tonumber(upto) + 1 then break end
  local items = ''
  for i = 1, #entry[2], 2 do
    if entry[2][i] == 'i' then items = entry[2][i + 1] end
  end
  for key in string.gmatch(items, '%a (%S+) [^\n]*\n') do
    if not seen[key] then
      seen[key] = true
      local record = call('HGETALL', P .. 'r:' .. key)
      for _, value in ipairs(record) do bytes = bytes + #value end
      rows[#rows + 1] = { key, record }
    end
  end
  upto = seq
  if bytes >= budget then break end
end
return { call('GET', P .. 'incarnation') or '', call('GET', P .. 'seq') or '0', call('GET', P .. 'digest') or '', upto, rows }
